"""Exports the names of `loader`, for repositories that have a `loader.py` of their own."""

from loader import DataLoader, Dataset, Jagged, Mixture, Packed, Stats, jagged, mix, open_dataset, pack

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
