"""Finds the catalog of the dataset version that a saved state names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.own_home import kept_here
from cachesvc.core.errors import CorruptData, NotFound
from cachesvc.core.model import DatasetId
from cachesvc.saved_runs.data import DataSource

if TYPE_CHECKING:
    from cachesvc.client.grants import DaemonGrants

# A catalog that is kept here is found in milliseconds, so what asks a daemon or a source is imported where it is used.


def catalog_of(source: DataSource, socket: str | None = None) -> Catalog:
    """The catalog of a version: this user's, the daemon's, or one that is made anew from the source, in this order.

    Raises NotFound where nobody keeps the catalog and the state does not say where the data lies, SourceChanged where the
    source holds another version now, and what reading the source raises.
    """
    try:
        return Catalog.open(kept_here(source.version))
    except (FileNotFoundError, CorruptData):  # none, or another release's
        pass
    from cachesvc.client.control import answers, find_daemon

    directory = socket or find_daemon()
    if directory is not None and answers(directory):
        return _granted(directory, source)
    if not source.uris:
        raise _unknown(source)
    from cachesvc.client.own_catalogs import compile_locally

    _, path = compile_locally(source.uris, source.options, source.version)
    return Catalog.open(path)


def catalog_at(path: str) -> Catalog:
    """The catalog in a file. Raises NotFound, CorruptData for no catalog of this release."""
    try:
        return Catalog.open(path)
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None


def _granted(directory: str, source: DataSource) -> Catalog:
    from cachesvc.client.grants import DaemonGrants

    grants = DaemonGrants(directory, DatasetId(source.version))
    try:
        return grants.open_catalog()
    except NotFound:
        pass
    finally:
        grants.close()
    open_in_daemon(directory, source)
    grants = DaemonGrants(directory, DatasetId(source.version))
    try:
        return grants.open_catalog()
    finally:
        grants.close()


def connected(grants: DaemonGrants, directory: str, source: DataSource) -> None:
    """Connect to a daemon, which opens the dataset if it does not know it. Raises as `DaemonGrants.connect` and
    `open_in_daemon`."""
    try:
        grants.connect()
    except NotFound:
        open_in_daemon(directory, source)


def open_in_daemon(directory: str, source: DataSource) -> None:
    """Have a daemon open a dataset that it does not know. Raises NotFound where the state does not say where the data lies,
    SourceChanged where the source holds another version now, and what opening it raises."""
    if not source.uris:
        raise _unknown(source)
    from cachesvc.client.control import Control

    with Control(directory) as control:
        control.open_dataset(source.uris, source.options, source.version)


def _unknown(source: DataSource) -> NotFound:
    return NotFound(
        f"no catalog of version {source.version} is kept here, and the state does not say where its data lies: give the "
        "URIs, a --catalog, or a --socket of a daemon that has the dataset open"
    )
