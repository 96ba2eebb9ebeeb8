"""The DataLoader swap: `from loader import DataLoader, open_dataset`."""

from loader.dataloader import DataLoader
from loader.dataset import Dataset, open_dataset
from loader.jagged import Jagged, jagged
from loader.mixture import Mixture, mix
from loader.packs import Packed, pack
from loader.stats import Stats

__all__ = [
    "DataLoader",
    "Dataset",
    "Jagged",
    "Mixture",
    "Packed",
    "Stats",
    "jagged",
    "mix",
    "open_dataset",
    "pack",
]
