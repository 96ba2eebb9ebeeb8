"""Batches and errors that do not pickle: an error in their place, and the next batch after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cachesvc.core.errors import InvalidInput
from loader import DataLoader
from tests.support.training.loader_fakes import MemoryLink, in_memory

COUNT, BAD = 16, 5


class Lazy:
    """A value that reads its data when it is pickled or unpickled, as an image of Pillow may."""

    def __init__(self, error: Exception | None, late: Exception | None = None) -> None:
        self.error, self.late = error, late

    def __getstate__(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.late

    def __setstate__(self, late: Exception) -> None:
        raise late


def truncated() -> Any:
    return Lazy(OSError("image file is truncated"))


def out_of_range() -> Any:  # the queue of multiprocessing takes an IndexError for its own
    return Lazy(IndexError("no such tile"))


def function() -> Any:
    return lambda: 0


def unreadable() -> Any:
    return Lazy(None, late=OSError("no such file here"))


class Bad:
    """A transform that gives the value of `make` for one sample."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self, sample: torch.Tensor) -> Any:
        return self.make() if int(sample) == BAD else int(sample)


def run(link: MemoryLink, transform: Any, **given: Any) -> tuple[list[Any], list[Exception]]:
    """Return the batches and the errors of an epoch."""
    data = in_memory(link, transform=transform)
    batches = iter(DataLoader(data, 4, num_workers=1, **{"collate_fn": list} | given))
    made, errors = list[Any](), list[Exception]()
    for _ in range(COUNT // 4):
        try:
            made.append(next(batches))
        except Exception as error:  # noqa: BLE001  returned
            errors.append(error)
    return made, errors


@pytest.mark.parametrize("make", [truncated, out_of_range, function])
def test_a_batch_that_does_not_pickle_is_an_error_that_names_the_sample(
    link: MemoryLink, make: Callable[[], Any]
) -> None:
    made, (error,) = run(link, Bad(make))
    assert made == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert isinstance(error, InvalidInput)
    assert f"r.bin:{BAD} cannot be sent from its worker to the trainer" in str(error)
    assert "worker_type='thread'" in str(error)
    assert "\n" not in str(error)


def in_dict(samples: list[Any]) -> dict[str, Any]:
    return {"values": samples, "first": torch.tensor(samples[0])}


def test_a_batch_of_another_form_is_named_itself(link: MemoryLink) -> None:
    made, (error,) = run(link, Bad(truncated), collate_fn=in_dict)
    assert [batch["values"][0] for batch in made] == [0, 8, 12]
    assert isinstance(error, InvalidInput)
    assert "batch 1 of epoch 0 cannot be sent" in str(error)
    assert "OSError: image file is truncated" in str(error)


def test_a_batch_that_does_not_unpickle_is_an_error(link: MemoryLink) -> None:
    made, (error,) = run(link, Bad(unreadable))
    assert len(made) == 3
    assert isinstance(error, InvalidInput)
    assert "does not unpickle in the trainer: OSError: no such file here" in str(error)


def fails(sample: torch.Tensor) -> Any:
    class Local(Exception):
        """A class that no other process can find."""

    if int(sample) == BAD:
        raise Local("of one function")
    return int(sample)


def test_an_exception_of_a_class_that_does_not_pickle_arrives_as_text(link: MemoryLink) -> None:
    made, (error,) = run(link, fails)
    assert len(made) == 3
    assert isinstance(error, RuntimeError)
    assert "Local: of one function" in str(error)


def init_fails(worker: int) -> None:
    class Local(Exception):
        """A class that no other process can find."""

    raise Local("of worker_init_fn")


def test_such_an_exception_of_worker_init_fn_arrives_too(link: MemoryLink) -> None:
    with pytest.raises(RuntimeError, match="Local: of worker_init_fn"):
        next(iter(DataLoader(in_memory(link), 4, num_workers=1, worker_init_fn=init_fails)))
