"""The same names as `loader`, for repositories that have a `loader.py` of their own."""

from loader import DataLoader, Dataset, Stats, open_dataset

__all__ = ["DataLoader", "Dataset", "Stats", "open_dataset"]
