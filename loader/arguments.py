"""Checks of a DataLoader's arguments that are possible before its rank and its data are known."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, Protocol, get_args

from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import Last
from loader.batches.bad_samples import OnError
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.wrapped import leaves_in
from loader.job.checkpoint import MAX_COUNT, MAX_SEED
from loader.job.topology import from_arguments
from loader.order_setup import Window, window_bytes


class LoaderArguments(Protocol):
    """Arguments that torch's own loader does not have, and that torch alone would ignore."""

    dataset: TorchDataset[Any]
    on_error: OnError
    epochs: int | None
    rank: int | None
    world_size: int | None
    mesh: Any
    global_batch_size: int | None
    last: Last | None
    has_sampler: bool


def check_arguments(
    last: Last | None,
    window: Window | None,
    rank: int | None,
    world_size: int | None,
    on_error: OnError,
    peer_failure_s: float,
) -> None:
    """Raise InvalidInput for values that are wrong for any rank and any data."""
    if on_error not in get_args(OnError):
        raise InvalidInput(f"on_error={on_error!r} is none of {', '.join(get_args(OnError))}")
    if last is not None and last not in get_args(Last):
        raise InvalidInput(f"last={last!r} is none of {', '.join(get_args(Last))}")
    if not isinstance(peer_failure_s, (int, float)) or not peer_failure_s > 0:
        raise InvalidInput(f"peer_failure_s={peer_failure_s!r} is no number of seconds above 0")
    if window is not None:
        window_bytes(window)
    from_arguments(rank, world_size)


def checked_numbers(
    seed: int, epochs: int | None, global_batch_size: int | None
) -> tuple[int, int | None, int | None]:
    """The numbers that saved states contain, as plain ints. Raises InvalidInput."""
    return (
        whole_number("seed", seed, 0, MAX_SEED),
        None if epochs is None else whole_number("epochs", epochs, 1, MAX_COUNT),
        None
        if global_batch_size is None
        else whole_number("global_batch_size", global_batch_size, 1, MAX_COUNT),
    )


def checked_interval(snapshot_every_n_steps: int | None) -> int | None:
    """Steps between the snapshots of workers, or None for no snapshots. Raises InvalidInput."""
    steps = snapshot_every_n_steps
    return None if steps is None else whole_number("snapshot_every_n_steps", steps, 0, MAX_COUNT)


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


def refuse_unused(loader: LoaderArguments, has_sampler: bool) -> None:
    """Raise InvalidInput for arguments that a loader which torch alone runs would ignore. Such a loader is over another
    dataset, where every rank would see everything, or has a sampler of the user's own."""
    if isinstance(loader.dataset, (Mixture, Packed)):
        raise InvalidInput(
            f"a {type(loader.dataset).__name__} has its own order in each epoch: leave the sampler out"
        )
    given = {"on_error": loader.on_error != "raise"}
    if not has_sampler:
        given |= {
            "rank": loader.rank is not None,
            "world_size": loader.world_size is not None,
            "mesh": loader.mesh is not None,
            "global_batch_size": loader.global_batch_size is not None,
            "last": loader.last is not None,
            "epochs": loader.epochs != 1,
        }
    unused = [f"{name}=" for name, is_given in given.items() if is_given]
    if unused:
        raise InvalidInput(
            f"{', '.join(unused)} would be ignored: torch alone runs this loader; give a map-style dataset of "
            "open_dataset, without a sampler of your own"
        )


def check_device_decoding(loader: LoaderArguments, device: object | None, collates_by_default: bool) -> None:
    """Raise InvalidInput for arguments under which no device could decode the images of `decode="cuda"`.

    `device`: None for the CPU. `collates_by_default`: neither a `collate_fn` nor `batch_size=None` was given.
    """
    if not any(leaf.sample_spec.decode == "cuda" for leaf in leaves_in(loader.dataset)):
        return
    if device is None:
        raise InvalidInput("decode='cuda' decodes on a device: give device='cuda' to the DataLoader")
    if loader.has_sampler or not collates_by_default:
        raise InvalidInput(
            "decode='cuda' needs the default collation and no sampler of your own: change the batch on the device"
        )
    if loader.on_error != "raise":
        raise InvalidInput(
            f"on_error={loader.on_error!r} does not see images that a device decodes: leave it out"
        )
