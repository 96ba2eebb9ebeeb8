"""cachesvc: the data service for training clusters."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("cachesvc")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"
