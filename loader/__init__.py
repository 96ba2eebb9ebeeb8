"""The DataLoader swap: `from loader import DataLoader, open_dataset`."""

from loader.dataloader import DataLoader
from loader.dataset import Dataset, open_dataset
from loader.stats import Stats

__all__ = ["DataLoader", "Dataset", "Stats", "open_dataset"]
