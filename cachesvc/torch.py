"""The names that a training script imports: `from cachesvc.torch import DataLoader, open_dataset`."""

from loader import (
    DataLoader,
    Dataset,
    ImageFolder,
    Jagged,
    Mixture,
    Packed,
    Stats,
    jagged,
    mix,
    open_dataset,
    pack,
)

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
