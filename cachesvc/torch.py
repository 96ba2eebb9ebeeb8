"""The same names as `loader`, for repositories that have a `loader.py` of their own."""

from loader import DataLoader, Dataset, Mixture, Packed, Stats, mix, open_dataset, pack

__all__ = ["DataLoader", "Dataset", "Mixture", "Packed", "Stats", "mix", "open_dataset", "pack"]
