"""Draws a status as lines of text: the overview, one dataset, one job, the keys. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from rich.text import Text

from cachesvc.cli import output
from cachesvc.cli.diagnosis import parts_of
from cachesvc.cli.nodes import HEADS, WRONG, cells_of
from cachesvc.cli.top.place import PANELS, Place, datasets_of, jobs_of
from cachesvc.core.safe_text import printable
from cachesvc.v1 import cachesvc_pb2 as pb

BAR = 20
"""Cells of the bar of a tier."""
SPARK = 34
"""Steps of the throughput that are drawn, the latest ones: some three minutes."""
EVENTS = 3
"""The latest events that are shown, and as many more as there is room for."""
FULL, EMPTY, LEVELS = "█", "░", "▁▂▃▄▅▆▇█"
RAM, NVME, COMING, ABSENT = "█", "▒", "+", "·"
KEYS = (
    ("up, down", "select a row"),
    ("Tab", "the other panel"),
    ("s", "sort by the next column"),
    ("Enter", "look into the selected dataset or job"),
    ("c", "the members of the cluster, and back"),
    ("Esc", "back"),
    ("q", "quit"),
)
DATASET_HEADS = [
    "dataset~",
    "size>",
    "resident>",
    "readers>",
    "hit rate>",
    "bound>",
    "source>?",
    "peers>?",
    "?",
]
JOB_HEADS = ["job", "step>", "batches/s>", "waiting>", "waits for~", "dataset~?", "readers>?"]


def screen(status: pb.StatusReply, place: Place, width: int, height: int, note: str = "") -> list[Text]:
    """The whole screen: at most `height` lines of at most `width` characters. `note`: what is wrong with the numbers."""
    body = height - 2
    dataset = next((each for each in status.datasets if each.dataset.id == place.inside), None)
    job = next((each for each in status.jobs if each.id == place.inside), None)
    if place.help:
        shown = [_plain(""), *(_plain(f"  {key:<10} {text}") for key, text in KEYS)]
    elif dataset is not None:
        shown = _dataset(status, dataset, width)
    elif job is not None:
        shown = _job(job, width)
    elif place.inside:
        shown = [_plain("it is gone")]
    elif place.cluster:
        shown = members(status, width, body)
    else:
        shown = overview(status, place, width, body)
    help_line = (
        "Esc back  q quit"
        if place.inside or place.help or place.cluster
        else "Tab panel  s sort  Enter look into  ? keys  q quit"
    )
    shown = shown[:body] + [_plain("")] * (body - len(shown))
    lines = [_head(status, note), *shown, _plain(help_line, "dim")]
    for line in lines:
        line.truncate(width)
    return lines


def once(status: pb.StatusReply, width: int, cluster: bool = False) -> list[Text]:
    """All of the overview, or of the members, for a terminal that is no screen."""
    lines = [_head(status, ""), *(members(status, width) if cluster else overview(status, None, width))]
    for line in lines:
        line.truncate(width)
    return lines


def members(status: pb.StatusReply, width: int, height: int | None = None) -> list[Text]:
    """The members of the cluster, those in trouble first, in at most `height` lines; None: all of them."""
    if not status.nodes:
        return [
            _plain("this daemon is alone; start it with --cluster to share extents with other nodes", "dim")
        ]
    found = sorted(status.nodes, key=lambda node: (node.state not in WRONG, not node.me, node.name))
    present = [node for node in found if node.state == "present"]
    room, free = sum(node.weight_bytes for node in found), sum(node.free_bytes for node in present)
    text = f"{output.plural(len(found), 'member')}, {len(present):,} present; {output.size(room)} of room,"
    text += f" {output.size(free)} free; {output.plural(sum(node.extents for node in found), 'extent')}"
    lines = [*_rates(status), _plain(""), _plain(text)]
    head, *rows = output.lines(HEADS, [cells_of(node) for node in found], width)
    lines.append(_plain(head, "bold"))
    for node, row in zip(found, rows, strict=True):
        lines.append(_plain(row, "bold red" if node.state in WRONG else ""))
    if height is not None and len(lines) > height:
        hidden = len(lines) - height + 1
        lines[height - 1 :] = [_plain(f"and {hidden:,} more", "dim")]
    return lines


def overview(
    status: pb.StatusReply, place: Place | None, width: int, height: int | None = None
) -> list[Text]:
    """The overview, in at most `height` lines; None: all of it. `place`: what is selected; None without a terminal."""
    top = [*(_tier(tier) for tier in status.tiers), *_rates(status)]
    notes, events = _notes(status), _events(status)
    given = place or Place()
    datasets, jobs = datasets_of(status, given), jobs_of(status, given)
    rooms, shown = [len(datasets), len(jobs)], EVENTS
    if height is not None:
        free = height - len(top) - len(notes) - 5  # the panels' headers and the lines between
        while sum(rooms) + EVENTS > free and max(rooms) > 1:
            rooms[rooms.index(max(rooms))] -= 1
        shown = max(EVENTS, free - sum(rooms))
    bottom = [*notes, *events[-shown:]]
    uris = {each.dataset.id: each.dataset.uri for each in status.datasets}
    found = [*top, _plain("")]
    tables = (
        (DATASET_HEADS, [_dataset_cells(row) for row in datasets]),
        (JOB_HEADS, [_job_cells(row, uris) for row in jobs]),
    )
    for panel, (heads, cells), room in zip(PANELS, tables, rooms, strict=True):
        selected = place.row if place is not None and place.panel == panel else None
        found += _panel(heads, cells, width, room, selected, given.sort_of(panel) if place else "")
        found.append(_plain(""))
    return found[:-1] + ([_plain(""), *bottom] if bottom else [])


def _head(status: pb.StatusReply, note: str) -> Text:
    text = f"cachesvc on {status.node}  {status.version}, up {output.duration(status.uptime_s)}, "
    text += f"{output.plural(status.readers, 'reader')}, {output.plural(status.fills_running, 'fill')}"
    head = _plain(text, "bold")
    if status.bypassed:
        head.append("  bypassed", "bold red")
    if note:
        head.append(f"  {note}", "bold red")
    return head


def _tier(tier: pb.TierStatus) -> Text:
    part = min(1.0, tier.used_bytes / tier.budget_bytes) if tier.budget_bytes else 0.0
    cells = int(part * BAR) if part < 1 else BAR
    line = _plain(f"{tier.name:<12} ")
    line.append(FULL * cells + EMPTY * (BAR - cells), "blue")
    line.append(f" {output.share(tier.used_bytes, tier.budget_bytes):>7}")
    if trouble := output.tier_trouble(tier):
        line.append(f"  {trouble}", "bold red")
    line.append(f"  {output.size(tier.used_bytes)} of {output.size(tier.budget_bytes)}")
    if tier.held_bytes:
        line.append(f", {output.size(tier.held_bytes)} held")
    return line


def _rates(status: pb.StatusReply) -> list[Text]:
    now, past = status.throughput, status.history
    series = [("source", now.source, past.source), ("peers", now.peers, past.peers)]
    series += [("ram", now.ram, past.ram), ("nvme", now.nvme, past.nvme)]
    if not status.nodes:
        del series[1]
    lines = []
    for name, rate, steps in series:
        most = max([rate, *steps, 1.0])
        line = _plain(f"{f'from {name}':<12} {output.size(rate) + '/s':>12}  ")
        line.append(spark(list(steps)[-SPARK:], most), "blue")
        line.append(f"  peak {output.size(most if most > 1 else 0)}/s", "dim")
        lines.append(line)
    return lines


def spark(values: Sequence[float], most: float) -> str:
    """A line of bars, one for each value; the tallest is `most`."""
    return "".join(LEVELS[min(len(LEVELS) - 1, int(len(LEVELS) * value / most))] for value in values).rjust(
        SPARK
    )


def _panel(
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    width: int,
    room: int,
    selected: int | None,
    sort: str,
) -> list[Text]:
    if not cells:
        return [_plain(f"no {output.Column.of(heads[0]).title}s", "dim")]
    head, *rows = output.lines(heads, cells, width)
    first = 0
    if selected is not None:
        selected = max(0, min(selected, len(rows) - 1))
        first = max(0, min(selected - room + 1, len(rows) - room))
    lines = [_plain(head, "bold")]
    for number, row in islice(enumerate(rows), first, first + room):
        lines.append(
            _plain(row.ljust(width) if number == selected else row, "reverse" if number == selected else "")
        )
    if hidden := len(rows) - room:
        lines[0].append(f"  ({hidden} more)" if len(head) + 12 < width else "")
    if sort and len(lines[0]) + len(sort) + 6 < width:
        lines[0].append(f"  by {sort}", "dim")
    return lines


def _dataset_cells(row: pb.DatasetStatus) -> list[str]:
    asked = row.hits + row.ahead + row.misses + row.refused
    return [
        row.dataset.uri,
        output.size(row.dataset.size_bytes),
        output.share(row.resident_bytes, row.dataset.size_bytes),
        f"{row.readers:,}",
        output.share(row.hit_rate, 1.0 if asked or row.epochs else 0.0),
        output.share(row.bound, 1.0 if row.bound else 0.0),
        output.size(row.source_bytes),
        output.size(row.peer_bytes) if row.peer_bytes else "-",
        output.marks(row),
    ]


def _job_cells(row: pb.JobStatus, uris: dict[str, str]) -> list[str]:
    names = dict.fromkeys(uris.get(each.dataset, each.dataset[:12]) for each in row.readers)
    planned = [each for each in row.readers if each.steps]
    return [
        row.id,
        f"{min(each.step for each in planned):,}/{max(each.steps for each in planned):,}" if planned else "-",
        f"{row.batches_per_s:.1f}" if row.batches_per_s else "-",
        f"{100 * row.waiting:.0f} %",
        row.waits_for or "nothing",
        " ".join(names),
        f"{row.readers_connected:,}",
    ]


def _notes(status: pb.StatusReply) -> list[Text]:
    lines = []
    if status.fills:
        ways = Counter(f"{each.reads or 'waiting'} > {each.tier}" for each in status.fills)
        oldest = max(each.age_s for each in status.fills)
        text = ", ".join(f"{count} {way}" for way, count in ways.most_common(3))
        lines.append(_plain(f"fills    {text}; the oldest for {oldest:.1f} s"))
    if away := [node.name or node.address for node in status.nodes if node.state != "present"]:
        lines.append(_plain(f"members  not present: {' '.join(away)}", "bold red"))
    elif status.nodes:
        lines.append(_plain(f"members  {len(status.nodes):,}, all present"))
    return lines


def _events(status: pb.StatusReply) -> list[Text]:
    return [
        _plain(
            f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {printable(event.words)}",
            "red" if event.error else "dim",
        )
        for event in status.events
    ]


def _dataset(status: pb.StatusReply, row: pb.DatasetStatus, width: int) -> list[Text]:
    found, size = row.dataset, output.size
    lines = [
        _plain(printable(found.uri)),
        _plain(f"{found.id}  {found.format}, {output.plural(found.samples, 'sample')}"),
    ]
    lines.append(
        _plain(
            f"{output.share(row.resident_bytes, found.size_bytes)} resident, {size(row.resident_bytes)} of"
            f" {size(found.size_bytes)} in {output.plural(found.extents, 'extent')}; {output.plural(row.readers, 'reader')}"
        )
    )
    marks = f"; {output.marks(row)}" if output.marks(row) else ""
    fetched = f"fetched {size(row.source_bytes)} from the source, {size(row.peer_bytes)} from peers{marks}"
    lines.append(_plain(fetched))
    lines += [_plain(""), *residency(row.residency, width)]
    lines.append(
        _plain(
            f"{RAM} in RAM  {NVME} on NVMe  {COMING} on the way  {ABSENT} at the source or elsewhere", "dim"
        )
    )
    if cells := [output.epoch_cells(each) for each in list(row.epochs)[-5:]]:
        lines += [_plain(""), *map(_plain, output.lines(output.EPOCH_HEADS, cells, width))]
    fills = [each for each in status.fills if each.dataset == found.id]
    if fills:
        lines.append(_plain(""))
        lines += [
            _plain(f"extent {each.extent}: {each.reads or 'waiting'} > {each.tier}, {each.age_s:.1f} s")
            for each in fills[:8]
        ]
    return lines


def residency(cells: pb.Residency, width: int) -> list[Text]:
    """A residency map, one character for each cell: where most of its bytes are."""
    marks = [
        max((100 - ram - nvme - coming, ABSENT), (coming, COMING), (nvme, NVME), (ram, RAM))[1]
        for ram, nvme, coming in zip(cells.ram, cells.nvme, cells.filling)
    ]
    return [_plain("".join(marks[start : start + width])) for start in range(0, len(marks), width)]


def _job(row: pb.JobStatus, width: int) -> list[Text]:
    user = f", user {row.user}" if row.user else ""
    lines = [
        _plain(
            f"job {row.id}{user}: {output.plural(row.readers_connected, 'reader')}, {row.batches_per_s:.1f} batches/s"
        )
    ]
    lines += [_plain(f"waits for {row.waits_for or 'nothing'}"), _plain("")]
    causes = parts_of(row)
    for cause, part in causes.most_common():
        line = _plain(f"{cause:<10} ")
        line.append(FULL * round(part * BAR) + EMPTY * (BAR - round(part * BAR)), "blue")
        line.append(f" {100 * part:3.0f} % of the time of a step")
        lines.append(line)
    heads = ["process>", "step>", "leased>", "batches/s>", "waits for~"]
    cells = [
        [
            f"{each.pid}" if each.pid else f"reader {each.number}",
            f"{each.step:,}/{each.steps:,}" if each.steps else "-",
            f"{each.leased_extents:,}",
            f"{each.batches_per_s:.1f}" if each.batches_per_s else "-",
            each.waits_for or "nothing",
        ]
        for each in row.readers
    ]
    if causes:
        lines.append(_plain(""))
    head, *body = output.lines(heads, cells, width)
    return [*lines, _plain(head, "bold"), *map(_plain, body)]


def _plain(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True)
