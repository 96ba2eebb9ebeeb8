"""The names that a training script imports: `from cachesvc.torch import DataLoader, open_dataset`."""

from loader import *  # noqa: F403  `loader` lists the names
from loader import __all__ as __all__
