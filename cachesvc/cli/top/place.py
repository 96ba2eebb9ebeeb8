"""The state of the screen: the panel, the selected row, how rows are sorted. Keys change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cachesvc.v1 import cachesvc_pb2 as pb

Panel = Literal["datasets", "jobs"]
PANELS: tuple[Panel, ...] = ("datasets", "jobs")
DATASET_SORTS: Mapping[str, Callable[[pb.DatasetStatus], object]] = {
    "readers": lambda row: (-row.readers, -row.resident_bytes),
    "size": lambda row: -row.dataset.size_bytes,
    "resident": lambda row: -row.resident_bytes,
    "hit rate": lambda row: row.hit_rate,
    "source": lambda row: -row.source_bytes,
    "uri": lambda row: row.dataset.uri,
}
JOB_SORTS: Mapping[str, Callable[[pb.JobStatus], object]] = {
    "waiting": lambda row: (-max((each.waiting_s for each in row.readers), default=0.0) // 1, -row.waiting),
    "batches": lambda row: -row.batches_per_s,
    "readers": lambda row: -row.readers_connected,
    "job": lambda row: row.id,
}
SORTS: Mapping[Panel, Sequence[str]] = {"datasets": tuple(DATASET_SORTS), "jobs": tuple(JOB_SORTS)}
UP, DOWN, ENTER, BACK, TAB = "up", "down", "enter", "back", "tab"
_NAMES = {
    "\x1b[A": UP,
    "\x1bOA": UP,
    "k": UP,
    "\x1b[B": DOWN,
    "\x1bOB": DOWN,
    "j": DOWN,
    "\r": ENTER,
    "\n": ENTER,
}
_NAMES |= {"\x1b": BACK, "\x7f": BACK, "\x08": BACK, "\t": TAB}


@dataclass(frozen=True, slots=True)
class Place:
    """`sorts` has an index into `SORTS` for each panel. `inside`: the id of the dataset or job that is looked into, if any.
    `help`: the keys are shown. `cluster`: the members of the cluster are."""

    panel: Panel = "datasets"
    row: int = 0
    sorts: tuple[int, int] = (0, 0)
    inside: str = ""
    help: bool = False
    cluster: bool = False

    def sort_of(self, panel: Panel) -> str:
        """The name of the order in which a panel's rows are."""
        return SORTS[panel][self.sorts[PANELS.index(panel)]]


def keys_of(text: str) -> list[str]:
    """Cut what a terminal sent into keys, by name."""
    keys = []
    while text:
        length = 3 if text[:3] in _NAMES else 1
        if length == 1 and text.startswith("\x1b[") and len(text) > 2:
            text = text[3:]  # a key that means nothing here
            continue
        keys.append(_NAMES.get(text[:length], text[:length]))
        text = text[length:]
    return keys


def pressed(place: Place, key: str, status: pb.StatusReply) -> Place | None:
    """The place after a key; None to end."""
    if key == "q":
        return None
    if place.help or key == "?":
        return replace(place, help=not place.help)
    if key in (BACK, "h"):
        return replace(place, inside="", cluster=False)
    if key == "c":
        return replace(place, cluster=not place.cluster, inside="")
    if place.inside or place.cluster:
        return place
    ids = _ids(status, place)
    row = max(0, min(place.row, len(ids) - 1))
    if key == TAB:
        return replace(place, panel=PANELS[1 - PANELS.index(place.panel)], row=0)
    if key == UP:
        return replace(place, row=max(0, row - 1))
    if key == DOWN:
        return replace(place, row=max(0, min(row + 1, len(ids) - 1)))
    if key == ENTER and ids:
        return replace(place, row=row, inside=ids[row])
    if key == "s":
        at = PANELS.index(place.panel)
        sorts = list(place.sorts)
        sorts[at] = (sorts[at] + 1) % len(SORTS[place.panel])
        return replace(place, sorts=(sorts[0], sorts[1]), row=0)
    return place


def datasets_of(status: pb.StatusReply, place: Place) -> list[pb.DatasetStatus]:
    """The datasets in the order of their panel."""
    return sorted(status.datasets, key=DATASET_SORTS[place.sort_of("datasets")])  # type: ignore[arg-type]


def jobs_of(status: pb.StatusReply, place: Place) -> list[pb.JobStatus]:
    """The jobs in the order of their panel."""
    return sorted(status.jobs, key=JOB_SORTS[place.sort_of("jobs")])  # type: ignore[arg-type]


def _ids(status: pb.StatusReply, place: Place) -> list[str]:
    if place.panel == "datasets":
        return [each.dataset.id for each in datasets_of(status, place)]
    return [each.id for each in jobs_of(status, place)]
