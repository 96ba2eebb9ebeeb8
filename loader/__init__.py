"""The `DataLoader` that replaces torch's, and the datasets it reads.

Scripts import these names from `cachesvc.torch`, because many repositories have a `loader.py` of their own.
"""

from loader.batches.stats import Stats
from loader.dataloader import DataLoader
from loader.datasets.dataset import Dataset, open_dataset
from loader.datasets.image_folder import ImageFolder
from loader.datasets.jagged import Jagged, jagged
from loader.datasets.mixture import Mixture, mix
from loader.datasets.packing import Packed, pack

__all__ = [
    "DataLoader",
    "Dataset",
    "ImageFolder",
    "Jagged",
    "Mixture",
    "Packed",
    "Stats",
    "jagged",
    "mix",
    "open_dataset",
    "pack",
]
