"""cachesvc: the data service for training clusters."""

__version__ = "0.1.0"
