"""Catalogs that this user's processes compile without a daemon, kept in a folder of the user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.catalog.pinned import kept_version
from cachesvc.catalog.survey import survey
from cachesvc.client.own_home import own_home
from cachesvc.config_files import own_sections
from cachesvc.core.errors import CorruptData, SourceChanged
from cachesvc.core.model import DatasetId
from cachesvc.sources.open import Sources, SourceSettings


def compile_locally(uris: Sequence[str], options: Options, version: str) -> tuple[DatasetId, str]:
    """Compile a catalog, or find the one compiled before; returns its id and its path. Nothing is asked of the source if
    the catalog of `version` is kept. Raises SourceChanged when the source does not hold `version`."""
    home = own_home()
    if kept_version(f"{home}/catalogs", version, uris, options):
        return DatasetId(version), f"{home}/catalogs/{version}.lmdb"
    sources = Sources(SourceSettings(metadata_directory=Path(home) / "metadata", sections=own_sections()))
    found = survey(sources.expand(uris), options, sources)
    if version and version != found.id:
        raise SourceChanged(
            f"{found.uri} is now version {found.id}, not {version}; open it without version= to go on with what is there"
        )
    path = f"{home}/catalogs/{found.id}.lmdb"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not _is_complete(path):
        build(found, path, sources, DirectBytes(sources), lambda done, total: None)
    return found.id, path


def _is_complete(path: str) -> bool:
    try:
        Catalog.open(path)
    except (FileNotFoundError, CorruptData):
        return False
    return True
