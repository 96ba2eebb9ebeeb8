"""Checks of a DataLoader's arguments that are possible before its rank and its data are known."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, get_args

from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.arguments import one_of, whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import Last, ShuffleScope
from cachesvc.core.order.state import MAX_COUNT
from loader.batches.bad_samples import OnError
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.wrapped import leaves_in
from loader.job.topology import from_arguments
from loader.order_setup import OrderArguments, Window, window_bytes


def check_arguments(
    last: Last | None,
    window: Window | None,
    shuffle_scope: ShuffleScope | None,
    rank: int | None,
    world_size: int | None,
    on_error: OnError,
    peer_failure_s: float,
) -> None:
    """Raise InvalidInput for values that are wrong for any rank and any data."""
    one_of("on_error", on_error, get_args(OnError))
    one_of("last", last, get_args(Last), ", or None")
    one_of("shuffle_scope", shuffle_scope, get_args(ShuffleScope), ", or None")
    if not isinstance(peer_failure_s, (int, float)) or not peer_failure_s > 0:
        raise InvalidInput(f"peer_failure_s={peer_failure_s!r} is no number of seconds above 0")
    if window is not None:
        window_bytes(window)
    from_arguments(rank, world_size)


def count_or_none(name: str, count: int | None, least: int = 1) -> int | None:
    """A number that saved states may contain, as a plain int, or None. Raises InvalidInput."""
    return None if count is None else whole_number(name, count, least, MAX_COUNT)


def key_list(name: str, keys: Any) -> tuple[str, ...]:
    """Keys of samples, without duplicates. Raises InvalidInput, also for a single text."""
    found = (keys,) if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable) else tuple(keys)
    if isinstance(keys, str) or not all(isinstance(key, str) for key in found):
        raise InvalidInput(f"{name}={str(keys)[:80]!r}: give a list of keys")
    return tuple(dict.fromkeys(found))


def dimension_names(dp_dims: Any) -> tuple[str, ...]:
    """The names of a mesh's data-parallel dimensions, from one name or several. Raises InvalidInput."""
    names = (dp_dims,) if isinstance(dp_dims, str) else dp_dims
    found = tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"dp_dims={dp_dims!r}: give names of the mesh's dimensions, ('dp',) say")
    return found


def refuse_empty(dataset: TorchDataset[Any], shuffle: bool | None) -> None:
    """Raise InvalidInput for an empty dataset of ours, before torch's sampler raises for its own `num_samples`."""
    if shuffle and isinstance(dataset, Sized) and not len(dataset) and any(True for _ in leaves_in(dataset)):
        raise InvalidInput(
            f"{type(dataset).__name__} has no samples to shuffle; is it an empty part of another dataset?"
        )


def refuse_unused(given: OrderArguments, on_error: OnError, has_sampler: bool) -> None:
    """Raise InvalidInput for arguments that a loader which torch alone runs would ignore. Such a loader is over another
    dataset, where every rank would see everything, or has a sampler of the user's own."""
    if isinstance(given.dataset, (Mixture, Packed)):
        raise InvalidInput(
            f"a {type(given.dataset).__name__} has its own order in each epoch: leave the sampler out"
        )
    unused = ["on_error="] if on_error != "raise" else []
    if not has_sampler:
        names = ("rank", "world_size", "mesh", "global_batch_size", "last", "shuffle_scope")
        unused += [f"{name}=" for name in names if getattr(given, name) is not None]
        unused += ["epochs="] if given.epochs != 1 else []
    unused += ["skip_steps="] if given.skip_steps else []
    if unused:
        raise InvalidInput(
            f"{', '.join(unused)} would be ignored: torch alone runs this loader; give a map-style dataset of "
            "open_dataset, without a sampler of your own"
        )


def check_device_decoding(
    dataset: TorchDataset[Any], device: object | None, on_error: OnError, collates_by_default: bool
) -> None:
    """Raise InvalidInput for arguments under which no device could decode the images of `decode="cuda"`.

    `device`: None for the CPU. `collates_by_default`: no `collate_fn`, `batch_size=None` or sampler was given.
    """
    if not any(leaf.sample_spec.decode == "cuda" for leaf in leaves_in(dataset)):
        return
    if device is None:
        raise InvalidInput("decode='cuda' decodes on a device: give device='cuda' to the DataLoader")
    if not collates_by_default:
        raise InvalidInput(
            "decode='cuda' needs the default collation and no sampler of your own: change the batch on the device"
        )
    if on_error != "raise":
        raise InvalidInput(f"on_error={on_error!r} does not see images that a device decodes: leave it out")
