"""`cachesvc cat` and `cachesvc cp`: objects on stdout or in a local folder, read through the node's cache."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from cachesvc.cli import options, output, resolve
from cachesvc.cli.index import unwritable
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.core.errors import CacheError, InvalidInput

if TYPE_CHECKING:
    from cachesvc.gateway.filesystem import CachedFileSystem

THREADS = 4
"""Files that are copied side by side, which hides the round trips of small ones."""
STEP_BYTES = 1 << 20


def _bytes(text: str) -> range:
    """The bytes of `258-516`, the second not included."""
    match = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", text)
    if match is None or int(match[2]) <= int(match[1]):
        raise InvalidInput(f"{text!r} is no range of bytes; write it as 258-516")
    return range(int(match[1]), int(match[2]))


@click.command()
@click.argument("uris", metavar="URI...", nargs=-1, required=True)
@click.option(
    "--bytes",
    "part",
    type=options.Parsed("begin-end", _bytes),
    help="Only these bytes of each, as `cachesvc order` prints them: 258-516 are 258.",
)
@options.daemon
def cat(uris: tuple[str, ...], part: range | None, socket: str | None, json: bool) -> int:
    """Write objects to stdout.

    They are read through the daemon, or without one from their source, as CACHESVC says.
    """
    with _file_system(socket) as files, output.written():
        for uri in uris:
            with _opened(files, resolve.absolute_uri(uri)) as file:
                if part is None:
                    shutil.copyfileobj(file, sys.stdout.buffer, STEP_BYTES)
                    continue
                file.seek(part.start)
                for at in range(part.start, part.stop, STEP_BYTES):
                    wanted = min(STEP_BYTES, part.stop - at)
                    if len(data := file.read(wanted)) < wanted:
                        raise InvalidInput(f"{uri} ends at byte {at + len(data):,}")
                    sys.stdout.buffer.write(data)
    return 0


@click.command()
@click.argument("uri")
@click.argument("folder", metavar="DIR")
@options.daemon
def cp(uri: str, folder: str, socket: str | None, json: bool) -> int:
    """Copy an object, or all below a prefix, into a folder.

    They are read through the daemon, or without one from their source, as CACHESVC says. A file appears under its name once
    it is whole, in place of one that is there. Hidden files below a prefix are left out.
    """
    if "://" in folder:
        raise InvalidInput(f"{folder} is no local folder: cp only reads through the cache")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InvalidInput(f"{folder} is no folder: cp copies into one, under the names of the objects")
    from cachesvc.gateway.urls import stripped

    with _file_system(socket) as files:
        root = stripped(resolve.absolute_uri(uri))
        files.info(root)  # raises NotFound, which `find` does not
        found: dict[str, Any] = files.find(root, detail=True)
        named = _named(root, found)
        total, done = sum(int(entry["size"]) for entry in found.values()), 0
        ended = threading.Event()
        with ProgressBar("copy", json) as progress, ThreadPoolExecutor(THREADS) as pool:
            copies = [
                pool.submit(_copied, files, name, os.path.join(folder, named[name]), ended) for name in named
            ]
            try:
                for copy in as_completed(copies):
                    done += copy.result()
                    progress.update(done, total)
            finally:
                ended.set()
                pool.shutdown(cancel_futures=True)
    text = f"{uri}: {len(named):,} file{'s' * (len(named) != 1)}, {output.size(total)}; in {folder}"
    output.report(
        json,
        text,
        {"event": "copied", "uri": uri, "folder": folder, "files": len(named), "size_bytes": total},
    )
    return 0


@contextmanager
def _file_system(socket: str | None) -> Iterator[CachedFileSystem]:
    """Yield the file system, which finds the daemon of `socket`, where one is given."""
    from cachesvc.gateway.filesystem import CachedFileSystem

    before = dict(os.environ)
    if socket:
        os.environ.update({"CACHESVC_SOCKET": socket, "CACHESVC": "require"})
    try:
        yield CachedFileSystem(skip_instance_cache=True)
    finally:
        for name in ("CACHESVC_SOCKET", "CACHESVC"):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


@contextmanager
def _opened(files: CachedFileSystem, uri: str) -> Iterator[Any]:
    try:
        file = files.open(uri)
    except IsADirectoryError:
        raise InvalidInput(f"{uri} is a folder; copy it: cachesvc cp {uri} DIR") from None
    with file:
        yield file


def _named(root: str, found: Iterable[str]) -> dict[str, str]:
    """Return the path below the target of each file. Raises InvalidInput as `check_copies`, and where a file would lie
    outside of the target."""
    from cachesvc.gateway.filesystem import check_copies

    named = {name: name[len(root) :].strip("/") or os.path.basename(root) for name in found}
    for name, path in named.items():
        if not {"", ".", ".."}.isdisjoint(path.split("/")) or "\0" in path:
            raise InvalidInput(f"{name} has no place in a local folder: write it with cachesvc cat")
    check_copies(list(named))
    return named


def _copied(files: CachedFileSystem, name: str, target: str, ended: threading.Event) -> int:
    """Copy one file, and return its size in bytes. Raises OutOfSpace, NotAllowed, what reading raises, and CancelledError
    where `ended` is set."""
    parent, own = os.path.split(target)
    part = f"{parent}/.{own}.{os.getpid()}.tmp"
    try:
        os.makedirs(parent, exist_ok=True)
        with open(part, "wb") as into, files.open(name) as file:
            while data := file.read(STEP_BYTES):
                if ended.is_set():
                    raise CancelledError
                into.write(data)
            size_bytes = into.tell()
        os.replace(part, target)
    except CacheError:
        raise
    except OSError as error:
        raise unwritable(target, error) from None
    finally:
        with suppress(OSError):
            os.unlink(part)
    return size_bytes
