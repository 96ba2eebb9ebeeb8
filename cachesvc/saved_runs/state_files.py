"""Finds the saved state of a loader in a file: JSON, or what `torch.save` wrote."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from cachesvc.core.errors import InvalidInput, NotFound, install
from cachesvc.core.order.state import LoaderState, parse_state

MAX_DEPTH = 8
"""Levels of a checkpoint that are searched for states."""
_MARKS = frozenset({"dataset", "global_batch", "canonical_nodes", "epochs_done"})
"""Fields that every state of a loader has, since version 4."""
_ZIP = b"PK"


def read_state(path: str, name: str = "") -> LoaderState:
    """The state of a loader that a file holds, alone or inside a checkpoint. `name` is its place there, such as
    `trainer.batches`, where there are several.

    Nothing in the file is run: files of torch are read with `weights_only`, and no tensor of them is loaded. Raises
    NotFound, InvalidInput for a file that holds no state or several, StateMismatch for a broken one.
    """
    found = dict(_states(_content(path), "", MAX_DEPTH))
    if name:
        if name not in found:
            raise InvalidInput(f"{path} has no state of a loader at {name!r}; it has {_names(found)}")
        return parse_state(found[name])
    if len({json.dumps(state, sort_keys=True, default=str) for state in found.values()}) != 1:
        raise InvalidInput(
            f"{path} holds several loaders' states ({_names(found)}): name one (--name)"
            if found
            else f"{path} holds no state of a loader: write json.dump(batches.state_dict(), file)"
        )
    return parse_state(next(iter(found.values())))


def _content(path: str) -> Any:
    if os.path.isdir(path):
        raise InvalidInput(
            f"{path} is a folder, of torch.distributed.checkpoint say: write the state as JSON beside it "
            "(json.dump(batches.state_dict(), file)), or convert the folder with torch.distributed.checkpoint.format_utils"
        )
    try:
        with open(path, "rb") as file:
            if file.read(2) == _ZIP:
                return _of_torch(path)
            file.seek(0)
            return json.load(file)
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    except (ValueError, RecursionError):
        raise InvalidInput(f"{path} is neither JSON nor a file of torch.save") from None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None


def _of_torch(path: str) -> Any:
    if importlib.util.find_spec("torch") is None:
        raise InvalidInput(
            f"{path} is a file of torch, which is not installed: {install('torch')}, or give JSON"
        )
    torch = importlib.import_module("torch")  # only for such a file: it takes seconds
    try:
        return torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  torch raises many kinds
        why = str(error).partition("\n")[0][:200]
        raise InvalidInput(
            f"{path} does not load with weights_only ({why}): write the state as JSON beside it"
        ) from None


def _states(content: Any, name: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The states inside, by name."""
    if isinstance(content, Mapping):
        if set(content) >= _MARKS:
            yield name, content
            return
        parts = content.items()
    elif isinstance(content, (list, tuple)):
        parts = enumerate(content)  # type: ignore[assignment]
    else:
        return
    for key, value in parts if depth else ():
        yield from _states(value, f"{name}.{key}" if name else str(key), depth - 1)


def _names(found: Mapping[str, Any]) -> str:
    return ", ".join(sorted(name or "the file itself" for name in found)[:8]) or "none"
