"""cachesvc: the data service for training clusters."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Read `__version__` when it is asked for: the import of `importlib.metadata` takes 20 ms, in every process."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("cachesvc")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"
