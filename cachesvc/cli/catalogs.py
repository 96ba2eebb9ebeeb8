"""A dataset's catalog as a file: from the daemon when there is one, built here otherwise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from cachesvc.catalog.build import DirectBytes, Options, build, survey
from cachesvc.catalog.catalog import Catalog
from cachesvc.cli import target
from cachesvc.cli.feedback import Feedback
from cachesvc.cli.notes import say_notes
from cachesvc.cli.options import is_dataset_id
from cachesvc.client.control import Control, answers, find_daemon
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import DaemonUnavailable
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.uri import canonical


@contextmanager
def catalog_file(
    socket: str | None, name: str, options: Options, as_json: bool
) -> Iterator[tuple[Catalog, str]]:
    """A dataset's catalog and the path of its file, good inside the block; what is noted of a URI is said.

    Without a daemon the catalog is built from the source with this user's own rights and thrown away; one that was
    named must answer.
    """
    directory = socket or find_daemon()
    if directory is not None and (socket or answers(directory)):
        with _granted(directory, name, options, as_json) as found:
            yield Catalog.open(found), found
    elif is_dataset_id(name):
        raise DaemonUnavailable(
            f"only a daemon knows dataset {name}: start one (cachesvc serve) or name the URI"
        )
    else:
        with _built(name, options, as_json) as found:
            catalog = Catalog.open(found)
            say_notes(catalog.notes, as_json)
            yield catalog, found


@contextmanager
def _granted(directory: str, name: str, options: Options, as_json: bool) -> Iterator[str]:
    with Control(directory) as control:
        dataset = target.current(control, name, options, as_json)
        grants = DaemonGrants(directory, dataset)
        try:
            fd = grants.catalog()
            try:
                yield f"/proc/self/fd/{fd}"
            finally:
                os.close(fd)
        finally:
            grants.close()


@contextmanager
def _built(name: str, options: Options, as_json: bool) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="cachesvc-") as directory:
        sources = Sources(SourceSettings())
        uris = sources.expand([canonical(target.absolute(name))])
        found = survey(uris, options, sources)
        path = f"{directory}/{found.id}.lmdb"
        with Feedback("index", as_json) as feedback:
            build(found, path, sources, DirectBytes(sources), feedback.update)
        yield path
