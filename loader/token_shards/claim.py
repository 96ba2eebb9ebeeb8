"""Claims the folder of a run: no other run writes there, and its shards are made of the same data."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from cachesvc.core.errors import InvalidInput, NotAllowed, OutOfSpace
from loader.token_shards.shards import UNFINISHED

MADE_OF = ".tokenize.json"
"""The file that says what the shards of a folder are made of. Hidden files are not data."""


@contextmanager
def claimed(folder: str, made_of: Mapping[str, str | int]) -> Iterator[None]:
    """Hold a folder, made where it does not exist, for shards made of `made_of`. Unfinished files are removed.

    Raises InvalidInput where the folder holds anything else or another run writes into it, NotAllowed and OutOfSpace.
    """
    with _opened(folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(f"another run writes into {folder}; wait for its end") from None
        _check(file, folder, made_of)
        for name in os.listdir(folder):
            if name.endswith(UNFINISHED):
                os.unlink(os.path.join(folder, name))
        yield


def _opened(folder: str) -> TextIO:
    path = os.path.join(folder, MADE_OF)
    try:
        os.makedirs(folder, exist_ok=True)
        others = sorted(os.listdir(folder))
        if others and MADE_OF not in others:
            raise InvalidInput(f"{folder} holds {others[0]}; name a folder that is empty or does not exist")
        return open(path, "a+")
    except PermissionError:
        raise NotAllowed(f"{folder} may not be written by this user") from None
    except (FileExistsError, NotADirectoryError):
        raise InvalidInput(f"{folder} is no folder; name one that is empty or does not exist") from None
    except OSError as error:
        raise OutOfSpace(f"{folder} cannot be written: {error.strerror or error}") from error


def _check(file: TextIO, folder: str, made_of: Mapping[str, str | int]) -> None:
    """Compare with what an earlier run noted, or note it."""
    file.seek(0)
    text = file.read()
    try:
        noted = json.loads(text) if text else None
    except ValueError:
        noted = None  # the run that noted it was killed
    if not isinstance(noted, dict):
        file.seek(0)
        file.truncate()
        json.dump(dict(made_of), file)
        file.flush()
        return
    differing = [name for name in made_of if noted.get(name) != made_of[name]]
    if differing:
        raise InvalidInput(f"{folder} holds shards of another {', '.join(differing)}; name another folder")
