"""The saved state of a run: plain numbers and texts, equal on every rank, from which its order can be computed.

In: the mapping that a checkpoint holds. Out: a checked `LoaderState`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.digests import parse_sum
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.safe_text import printable

STATE_VERSION, OLDEST_VERSION = 5, 4
"""The version that is written, and the oldest that can be loaded: that of the release before."""
SINCE_VERSION_5 = {
    "edges": "join",
    "skipped": "",
    "excluded": "",
    "since_epoch": 0,
    "since_step": 0,
    "data_step": 0,
    "source": "",
    "digest": "",
}
"""The fields that states of version 4 lack. Their runs predicted the first token of a document from the one before.
`parse_state` computes `data_step` as if all epochs had equal lengths."""
MAX_COUNT, MAX_SEED = 2**63 - 1, 2**64 - 1
"""The order counts in numpy's int64, and its keys are unsigned 64-bit numbers."""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The saved state of a run. `step` of `steps` global batches of `epoch` are consumed, and `micro` micro-batches of the
    next, by each of `world_size` ranks in batches of `batch_size` (both 0 between steps). `step` counts skipped steps too,
    as `data_step` does, which counts from the first epoch on. `source` says in JSON where the data lies
    (`saved_runs/data.py`), "" where it does not. `digest` is that of all samples handed over, in hex, "" where it is not
    known. The other fields are those of `OrderSpec`."""

    version: int
    dataset: str
    samples: int
    epoch: int
    step: int
    micro: int
    steps: int
    seed: int
    global_batch: int
    batch_size: int
    world_size: int
    window_extents: int
    canonical_nodes: int
    shuffle: bool
    last: str
    epochs_done: int
    """Complete epochs of the `iter()` that stands here; its `epochs` end where they would have ended."""
    rotated_from: int
    edges: str
    """The edges of packs that were given none: see `pack`."""
    skipped: str
    excluded: str
    since_epoch: int
    since_step: int
    data_step: int
    source: str
    digest: str
    shuffle_scope: str

    @property
    def spec(self) -> OrderSpec:
        """The order of the run. Raises InvalidInput for numbers that make no order."""
        return OrderSpec(**{name: getattr(self, name) for name in OrderSpec.__dataclass_fields__})

    @property
    def over(self) -> bool:
        """True once its epoch is consumed."""
        return self.steps > 0 and self.step >= self.steps

    def plain(self) -> dict[str, Any]:
        """The state as a dict of plain values."""
        return asdict(self)


def parse_state(state: Mapping[str, Any]) -> LoaderState:
    """The inverse of `LoaderState.plain`. Raises StateMismatch for anything else."""
    expected = LoaderState.__dataclass_fields__
    if not isinstance(state, Mapping):
        raise StateMismatch(
            f"{type(state).__name__} is not a state of this loader: give what state_dict() returned"
        )
    version = state.get("version")
    if type(version) is int and version < OLDEST_VERSION:
        raise StateMismatch(
            f"a state of version {version}, which 0.2.0 reads: load it there, and save it again for this program"
        )
    if type(version) is int and version == OLDEST_VERSION:
        state = {**SINCE_VERSION_5, **state}
    state = {"shuffle_scope": "job", **state}  # the only one, before states had this field
    if set(state) != set(expected):
        odd = ", ".join(sorted(map(str, set(state) ^ set(expected))))
        raise StateMismatch(f"not a state of this loader: its keys differ in {printable(odd)}")
    texts = ("dataset", "last", "edges", "skipped", "excluded", "source", "digest", "shuffle_scope")
    flags = ("shuffle",)
    for name in expected:
        kind = str if name in texts else bool if name in flags else int
        if type(state[name]) is not kind:
            found = printable(repr(state[name]))
            raise StateMismatch(f"the state's {name} is {found}, not {kind.__name__}")
        if kind is int and not 0 <= state[name] <= (MAX_SEED if name == "seed" else MAX_COUNT):
            raise StateMismatch(f"the state's {name} is {state[name]}: out of range")
    if state["version"] > STATE_VERSION:
        raise StateMismatch(
            f"a state of version {state['version']}; this program reads {OLDEST_VERSION} to {STATE_VERSION}"
        )
    parsed = LoaderState(**state)
    _check_consistent(parsed)
    if parsed.version == OLDEST_VERSION:
        return replace(parsed, data_step=min(parsed.epoch * parsed.steps + parsed.step, MAX_COUNT))
    return parsed


def _check_consistent(state: LoaderState) -> None:
    """Raise StateMismatch for numbers that contradict each other."""
    try:
        state.spec  # noqa: B018
        if state.digest:
            parse_sum(state.digest)
    except InvalidInput as error:
        raise StateMismatch(f"no loader saved this state: {printable(str(error))}") from None
    each = state.batch_size * state.world_size
    cut = each > 0 and state.global_batch % each == 0 and state.micro * each < state.global_batch
    if not (cut if state.micro else state.batch_size == state.world_size == 0):
        raise StateMismatch(
            f"no loader saved this state: {state.micro} batches of {state.batch_size} on each of {state.world_size} ranks"
            f" are no part of a global batch of {state.global_batch}"
        )
