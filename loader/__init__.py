"""The DataLoader swap: `from loader import DataLoader, open_dataset`."""

from loader.dataloader import DataLoader
from loader.dataset import Dataset, open_dataset
from loader.mixture import Mixture, mix
from loader.packs import Packed, pack
from loader.stats import Stats

__all__ = ["DataLoader", "Dataset", "Mixture", "Packed", "Stats", "mix", "open_dataset", "pack"]
