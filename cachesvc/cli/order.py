"""`cachesvc order`: print which samples a run trained in which steps, from its saved state."""

from __future__ import annotations

import json as json_module
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from cachesvc.cli import options, output
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.safe_text import printable

if TYPE_CHECKING:
    from cachesvc.saved_runs.saved_run import SavedRun, Taken


def _steps(text: str) -> range:
    """The steps of `1000:1010`, or of a single number."""
    match = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", text)
    if match is None or (match[2] and int(match[2]) <= int(match[1])):
        raise InvalidInput(f"{text!r} is no range of steps; write it as 1000:1010, or one number")
    return range(int(match[1]), int(match[2]) if match[2] else int(match[1]) + 1)


STEPS = options.Parsed("first:end", _steps)


@click.command()
@click.argument("uris", nargs=-1, metavar="[URI]...")
@options.saved_state
@click.option("--steps", type=STEPS, help="Data steps: 1000:1010 is ten of them, 1000 one.")
@click.option(
    "--key", "keys", multiple=True, metavar="KEY", help="Print the steps of this sample; repeatable."
)
@click.option(
    "--digest",
    is_flag=True,
    help="Print the digest of --steps, by default of the run so far.",
)
@click.option("--fetch", is_flag=True, help="With --digest: fetch what is not cached.")
@click.option("--rank", type=click.IntRange(0), help="Only this rank's samples of each step.")
@click.option("--world", type=click.IntRange(1), help="The number of ranks, with --rank.")
@options.daemon
def order(
    uris: tuple[str, ...],
    state: str | None,
    name: str,
    catalogs: tuple[str, ...],
    counts: str | None,
    ids: str | None,
    steps: range | None,
    keys: tuple[str, ...],
    digest: bool,
    fetch: bool,
    rank: int | None,
    world: int | None,
    socket: str | None,
    json: bool,
) -> int:
    """Print the samples of a run's steps, from its saved state.

    No data is read. Steps are data steps: global batches, counted through all epochs from 0. A line has the data step, the
    number of the optimizer's step, the slot in the global batch, the key, and where the sample is stored. With --key, lines
    are the steps before the state's place that had the sample. Give URIs if the data has moved since the state was saved.
    --digest needs digests of the data's bytes: the daemon has those of what it has cached.
    """
    from cachesvc.saved_runs.open import opened_run

    if state is None:
        raise InvalidInput("give the --state of a run")
    if (steps is None) == (not keys) and not digest:
        raise InvalidInput("give either --steps FIRST:END or --key KEY")
    run = opened_run(state, name, catalogs, ids, _absolute(uris), socket, counts)
    if digest:
        return _print_digest(run, steps, socket, fetch, json)
    with output.written():
        low, high = run.slots_of(rank, world)
        if keys:
            for key in keys:
                found = [taken for taken in run.steps_with(key) if low <= taken.slot < high]
                if not found:
                    output.print_notes([f"no step had the sample {key}"], json)
                _print(run, found, json)
            return 0
        assert steps is not None, "one of the two was given"
        if steps.stop > run.state.data_step:
            output.print_notes(
                [
                    f"the state stands at step {run.state.data_step:,}: from there on, this is what the run reads next"
                ],
                json,
            )
        for step in steps:
            if run.is_skipped(step):
                _print_skipped(step, json)
            else:
                _print(run, run.samples_of(step, low, high), json)
    return 0


def _absolute(uris: Sequence[str]) -> list[str]:
    if not uris:
        return []
    from cachesvc.cli import resolve  # a tenth of a second

    return [*map(resolve.absolute_uri, uris)]


def _print_digest(run: SavedRun, steps: range | None, socket: str | None, fetch: bool, as_json: bool) -> int:
    """Print the digest of steps; of a whole run, compare it with the state's. Raises StateMismatch, and as `Contents`."""
    from cachesvc.saved_runs.contents import Contents

    contents = Contents(socket, fetch)
    found = run.digest_of(steps or range(run.state.data_step), contents.of).hex()
    saved = "" if steps else run.state.digest
    of = f"steps {steps.start}:{steps.stop}" if steps else f"the run's {run.state.data_step:,} steps"
    same = ", as the state has it" if found == saved else ""
    output.report(as_json, f"{found}  {of}{same}", {"digest": found, "state": saved})
    if saved and not same:
        raise StateMismatch(
            f"the state's digest is {saved}: the run was given other samples, or other bytes, than those of its steps"
        )
    return 0


def _print(run: SavedRun, taken: Iterable[Taken], as_json: bool) -> None:
    for each, row in _rows(run, [*taken]):
        if as_json:
            sys.stdout.write(f"{json_module.dumps(row)}\n")
            continue
        places = (
            f"{place['object']} {place['begin']}-{place['end']}"
            if "end" in place
            else f"{place['object']} row {place['row']}"
            for place in row["places"]
        )
        key = row["key"] or " ".join(row.get("documents", ()))
        cells = (str(each.step), str(each.trained), str(each.slot), key, " ".join(places))
        sys.stdout.write("\t".join(map(printable, cells)) + "\n")


def _rows(run: SavedRun, taken: list[Taken]) -> Iterator[tuple[Taken, dict[str, Any]]]:
    for each, sample in zip(taken, run.named(taken), strict=True):
        places = [
            {"object": place.object}
            | ({"row": place.row} if place.row >= 0 else {"begin": place.begin, "end": place.end})
            for place in sample.places
        ]
        yield (
            each,
            {
                "step": each.step,
                "trained": each.trained,
                "slot": each.slot,
                "key": sample.key,
                "places": places,
            }
            | ({"documents": [*sample.documents]} if sample.documents else {}),
        )


def _print_skipped(step: int, as_json: bool) -> None:
    sys.stdout.write(f'{{"step": {step}, "skipped": true}}\n' if as_json else f"{step}\tskipped\n")
