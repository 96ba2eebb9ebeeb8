"""Provides a dataset's catalog as a file: from the daemon if there is one, else built here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.catalog.prepared import origin_of
from cachesvc.catalog.survey import survey
from cachesvc.cli import output, resolve
from cachesvc.cli.options import is_dataset_id
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.client.control import Control, answers, find_daemon
from cachesvc.client.grants import DaemonGrants
from cachesvc.config_files import own_sections
from cachesvc.core.errors import DaemonUnavailable
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.shard_lists import spelled_uris
from cachesvc.sources.uri import canonical
from cachesvc.system.descriptors import closing_fd


@contextmanager
def catalog_file(
    socket: str | None, name: str, options: Options, as_json: bool
) -> Iterator[tuple[Catalog, str]]:
    """Yield a dataset's catalog and the path of its file, valid inside the block, and print the catalog's notes.

    Without a daemon the catalog is built from the source with this user's rights, and deleted afterwards. A daemon given
    by `socket` must answer: DaemonUnavailable.
    """
    directory = socket or find_daemon()
    if directory is not None and (socket or answers(directory)):
        with _granted(directory, name, options, as_json) as file:
            catalog = Catalog.open(file)
            origin = origin_of(catalog)
            if origin is None:
                yield catalog, file
                return
        with _granted(
            directory, origin.source, options, as_json
        ) as file:  # the source's catalog names the samples
            yield Catalog.open(file), file
    elif is_dataset_id(name):
        raise DaemonUnavailable(
            f"only a daemon knows dataset {name}: start one (cachesvc serve) or name the URI"
        )
    else:
        with _built(name, options, as_json) as file:
            catalog = Catalog.open(file)
            output.print_notes(catalog.notes, as_json)
            yield catalog, file


@contextmanager
def _granted(directory: str, name: str, options: Options, as_json: bool) -> Iterator[str]:
    with Control(directory) as control:
        dataset = resolve.current_version(control, name, options, as_json)
        with closing(DaemonGrants(directory, dataset)) as grants, closing_fd(grants.catalog()) as fd:
            yield f"/proc/self/fd/{fd}"


@contextmanager
def _built(name: str, options: Options, as_json: bool) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="cachesvc-") as directory:
        sources = Sources(SourceSettings(sections=own_sections()))
        uris = sources.expand([canonical(resolve.absolute_uri(each)) for each in spelled_uris(name)])
        surveyed = survey(uris, options, sources)
        path = f"{directory}/{surveyed.id}.lmdb"
        with ProgressBar("index", as_json) as progress:
            build(surveyed, path, sources, DirectBytes(sources), progress.update)
        yield path
