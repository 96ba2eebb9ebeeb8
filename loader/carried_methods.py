"""Methods of a loader as attributes of the object, for wrappers that copy its attributes: the results of Fabric's
`setup_dataloaders` and of Ray's `prepare_data_loader` have them too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakMethod

CARRIED = ("state_dict", "load_state_dict", "skip", "stats")


def carried_methods(loader: object) -> dict[str, Callable[..., Any]]:
    """The methods by name. They do not keep the loader alive; its wrappers do."""
    return {name: _weakly(getattr(type(loader), name).__get__(loader)) for name in CARRIED}


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    reference = WeakMethod(method)

    @wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        living = reference()
        if living is None:
            raise ReferenceError("this DataLoader has ended: keep it, or the object that wraps it")
        return living(*given, **named)

    del call.__wrapped__  # it would keep the loader alive
    return call
