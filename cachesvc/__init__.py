"""cachesvc: the data service for training clusters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from os import PathLike

    def path(uri: str | PathLike[str]) -> AbstractContextManager[str]:
        """Give a read-only path of one object. See `cachesvc.gateway.paths.path`."""


def __getattr__(name: str) -> Any:
    """Import `path` and read `__version__` when they are asked for: every process of the daemon imports this package, and
    `importlib.metadata` alone takes 20 ms."""
    if name == "path":
        return import_module("cachesvc.gateway.paths").path
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("cachesvc")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"
