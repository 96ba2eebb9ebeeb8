"""`cachesvc order` says from a saved state alone what a loader handed over in each step."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.saved_runs.kept_counts import KeptCounts, key_of_ends
from cachesvc.saved_runs.open import opened_run
from loader import DataLoader, Dataset, mix, open_dataset, pack
from testbed.node import Daemon
from tests.support.datasets import array_file

FILES, BATCH = 90, 8
GIVEN: dict[str, Any] = {"shuffle": True, "epochs": None, "seed": 7}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files whose bytes are their numbers, read without a daemon."""
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data"
    for number in range(FILES):
        file = data / f"{number % 3}" / f"{number:03d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number:03d}" * (number + 1))
    return data


def opened(folder: Path) -> Dataset:
    return open_dataset(folder, fields="txt", extent_bytes=4096)


def keys_by_step(loader: DataLoader, steps: int) -> list[list[str]]:
    """The keys that a loader hands over in its next steps."""
    found = []
    for texts in islice(loader, steps):
        numbers = [int(each[:3]) for each in texts[: loader.valid]]
        found.append([f"{number % 3}/{number:03d}.txt" for number in numbers])
    return found


def ordered(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["order", *arguments, "--json"]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def saved(loader: DataLoader, file: Path) -> str:
    file.write_text(json.dumps({"model": [1, 2], "loader": loader.state_dict()}))
    return str(file)


@pytest.mark.parametrize("part", ["all", "where", "split", "take", "select", "nested"])
def test_the_samples_of_every_step_come_from_the_state_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    whole = opened(folder)
    view = {
        "all": lambda: whole,
        "where": lambda: whole.where("key.startswith('1/')"),
        "split": lambda: whole.split({"train": 0.7, "val": 0.3}, seed=3)["train"],
        "take": lambda: whole.take(50),
        "select": lambda: whole.select([70, 3, 4, 5, 1, 88, 2, 9, 30, 31]),
        "nested": lambda: whole.where("key.startswith('1/')").split({"a": 0.5, "b": 0.5})["b"].take(12),
    }[part]()
    loader = DataLoader(view, BATCH, **GIVEN)
    epoch = -(-len(view) // BATCH)
    expected = keys_by_step(loader, 3 * epoch)
    state = saved(loader, tmp_path / "state.json")
    rows = ordered(capsys, "--state", state, "--steps", f"0:{3 * epoch}")
    assert [[row["key"] for row in rows if row["step"] == step] for step in range(3 * epoch)] == expected
    for row in rows:
        (place,) = row["places"]
        file = Path(place["object"].removeprefix("file://"))
        assert str(file) == f"{folder}/{row['key']}"
        assert (place["begin"], place["end"]) == (0, file.stat().st_size)
    wanted = expected[0][0]
    found = ordered(capsys, "--state", state, "--key", wanted)
    assert [row["step"] for row in found] == [step for step, keys in enumerate(expected) if wanted in keys]


COMPOSED = {
    "mixture": lambda a, b: mix({a: 0.7, b.take(9): 0.3}, size=100),
    "epochs": lambda a, b: mix({a: 0.5, b: 0.5}, size="last").reweighed({a: 0.9, b: 0.1}, epoch=1),
    "schedule": lambda a, b: mix({a: 0.9, b: 0.1}, schedule=[(6, {a: 0.1, b: 0.9})], ramp="linear", size=64),
    "once": lambda a, b: mix({a: 0.6, b: 0.4}, schedule=[(4, {a: 0.2, b: 0.8})], size="once"),
    "packs": lambda a, b: pack(b, 24),
    "whole packs": lambda a, b: pack(a, 24, fit="best", targets="shifted"),
    "mixed packs": lambda a, b: mix({pack(b, 24): 0.5, pack(a, 24, fit="best"): 0.5}, schedule=[]),
    "packs that end at a token": lambda a, b: pack(b, 24, eos=7, counts=counts_beside(b)),
    "tokenised packs": lambda a, b: mix(
        {pack(each, 24, tokenize=three, counts=counts_beside(a)): 1 for each in (a, b)}
    ),
}


def counts_beside(dataset: Dataset) -> Path:
    return Path(dataset.catalog.object(0).uri.removeprefix("file://")).parent / "counts"


def three(record: torch.Tensor) -> list[int]:
    return record.tolist()[:3] * (1 + int(record[0]) % 5)


def composed(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Dataset]]:
    """A dataset of `COMPOSED`, read without a daemon, and the two that it is made of."""
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("CACHESVC_SOCKET", str(root / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    for name, count in (("a", 40), ("b", 25)):
        array_file(root / f"{name}.bin", np.arange(count * 10, dtype="<u2").reshape(count, 10))
    form: dict[str, Any] = {"format": "tokens", "dtype": "uint16", "seq_len": 10, "out": "int64"}
    parts = [open_dataset(root / f"{name}.bin", extent_bytes=4096, **form) for name in "ab"]
    return COMPOSED[kind](*parts), parts


def counts_in(root: Path) -> list[str]:
    """The arguments that name the folder of `counts_beside`, where there is one."""
    return ["--counts", str(root / "counts")] if (root / "counts").exists() else []


@pytest.mark.parametrize("kind", COMPOSED)
@pytest.mark.parametrize("shuffle", [True, False])
def test_mixtures_and_packs_come_from_the_state_alone(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    shuffle: bool,
) -> None:
    """The samples are those that the loader names, in every step; a key leads back to its steps."""
    data, parts = composed(kind, tmp_path, monkeypatch)
    given = GIVEN | {"shuffle": shuffle, "skip_steps": [range(3, 5)]}
    loader = DataLoader(data, 4, **given)
    steps = 2 * loader.state_dict()["steps"] + 1
    loader.skip(steps)
    state = saved(loader, tmp_path / "state.json")
    last = loader.state_dict()["data_step"]
    counts = counts_in(tmp_path)
    rows = ordered(capsys, "--state", state, "--steps", f"0:{last}", *counts)
    found: dict[str, list[int]] = {}
    for step in range(last):
        named = loader.samples_of(step)
        mine = [row for row in rows if row["step"] == step and "skipped" not in row]
        expected = [[*map(tuple, each.places)] for each in named]
        told = [[(p["object"], p["begin"], p["end"], -1) for p in row["places"]] for row in mine]
        assert [row["slot"] for row in mine] == [each.slot for each in named]
        assert told == expected
        assert [row["key"] for row in mine] == [each.key for each in named]
        assert [row.get("documents", []) for row in mine] == [[*each.documents] for each in named]
        for row in mine:
            for place in row["places"]:
                first, end = place["begin"] // 20, -(-place["end"] // 20)
                for record in range(first, end):
                    found.setdefault(f"{Path(place['object']).name}:{record}", []).append(step)
    key, within = max(found.items(), key=lambda each: len(each[1]))
    again = ordered(capsys, "--state", state, "--key", key, *counts)
    assert [row["step"] for row in again] == sorted(within)
    wanted = {part.catalog.id: set[int]() for part in parts}
    for place in (
        each for step in (last, last + 1) for named in loader.samples_of(step) for each in named.places
    ):
        catalog = next(part.catalog for part in parts if place.object.endswith(part.catalog.uri[-5:]))
        first, end = np.searchsorted(catalog.extent_starts, [place.begin, place.end - 1], "right") - 1
        wanted[catalog.id].update(range(first, end + 1))
    opened_again = opened_run(state, counts=counts[1] if counts else None)
    ahead = {
        leaf.catalog.id: {*extents.tolist()}
        for leaf, extents in opened_again.extents_ahead(2, [opened_again.slots_of(None, None)])
    }
    assert ahead == {name: extents for name, extents in wanted.items() if name in ahead}
    assert any(ahead.values())


def test_skipped_steps_excluded_samples_and_ranks_are_in_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaders = [
        DataLoader(
            opened(folder),
            BATCH // 2,
            rank=rank,
            world_size=2,
            skip_steps=[range(2, 4)],
            exclude=["1/001.txt"],
            **GIVEN,
        )
        for rank in range(2)
    ]
    expected = [keys_by_step(loader, 20) for loader in loaders]
    file = tmp_path / "state.pt"
    torch.save({"loader": loaders[0].state_dict(), "weights": torch.zeros(9)}, file)
    rows = ordered(capsys, "--state", str(file), "--steps", "0:22")
    assert [row["step"] for row in rows if row.get("skipped")] == [2, 3]
    steps = [0, 1, *range(4, 22)]
    for rank, wanted in enumerate(expected):
        rows = ordered(capsys, "--state", str(file), "--steps", "0:22", "--rank", str(rank), "--world", "2")
        by_step = [[row["key"] for row in rows if row["step"] == step] for step in steps]
        assert [sorted(row) for row in by_step] == [sorted(row) for row in wanted]
        assert {row["step"]: row["trained"] for row in rows if "trained" in row} == {
            step: trained for trained, step in enumerate(steps) if by_step[trained]
        }
    assert run(["order", "--state", str(file), "--key", "1/001.txt"]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "warning: no step had the sample 1/001.txt\n")
    assert run(["order", "--state", str(file), "--steps", "2:5"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["2", "skipped"], ["3", "skipped"]]
    assert [line[:2] for line in lines[2:]] == [["4", "2"]] * BATCH


def test_the_digest_of_a_run_is_computed_without_training_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = DataLoader(opened(folder), BATCH, skip_steps=[range(2, 4)], **GIVEN)
    keys_by_step(loader, 30)
    file = tmp_path / "state.json"
    state = loader.state_dict()
    file.write_text(json.dumps(state))
    assert run(["order", "--state", str(file), "--digest"]) == 10
    assert "--fetch" in capsys.readouterr().err
    (row,) = ordered(capsys, "--state", str(file), "--digest", "--fetch")
    assert row == {"digest": loader.digest().hex(), "state": state["digest"]}
    assert run(["order", "--state", str(file), "--digest", "--fetch"]) == 0
    assert "as the state has it" in capsys.readouterr().out
    (part,) = ordered(capsys, "--state", str(file), "--digest", "--fetch", "--steps", "0:4")
    assert part["digest"] not in (row["digest"], "")
    file.write_text(json.dumps(state | {"digest": part["digest"]}))
    assert run(["order", "--state", str(file), "--digest", "--fetch"]) == 12
    assert "other samples" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["once", "packs", "mixed packs", "tokenised packs"])
def test_the_digest_of_packs_and_mixtures_is_computed_without_training_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    loader = DataLoader(composed(kind, tmp_path, monkeypatch)[0], 4, **GIVEN, skip_steps=[range(2, 4)])
    for _ in islice(loader, 2 * loader.state_dict()["steps"] + 1):
        pass
    expected, state = loader.digest().hex(), saved(loader, tmp_path / "state.json")
    arguments = ["--state", state, "--digest", "--fetch", *counts_in(tmp_path)]
    assert ordered(capsys, *arguments) == [{"digest": expected, "state": expected}]
    parts = [ordered(capsys, *arguments, "--steps", steps)[0]["digest"] for steps in ("0:3", "3:99")]
    assert expected not in parts


def test_packs_that_reading_the_data_gave_need_what_it_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, (_, dataset) = composed("packs that end at a token", tmp_path, monkeypatch)
    arguments = [
        "order",
        "--state",
        saved(DataLoader(data, 4, **GIVEN), tmp_path / "state.json"),
        "--steps",
        "0",
    ]
    assert run(arguments) == 4
    assert "as --counts" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert run([*arguments, "--counts", str(tmp_path / "other")]) == 4
    assert "other does not have them" in capsys.readouterr().err
    for file in (tmp_path / "counts").iterdir():
        file.unlink()
    pack(dataset, 24, eos=7, counts=tmp_path / "counts")
    assert run([*arguments, *counts_in(tmp_path)]) == 0
    (file,) = (tmp_path / "counts").iterdir()
    KeptCounts(str(tmp_path / "other")).get(
        key_of_ends(dataset.version, 7, np.dtype("<u2"), 0), lambda: np.array([4])
    )
    assert run([*arguments, "--counts", str(tmp_path / "other")]) == 12, "of other tokens"


def test_the_digest_of_a_run_is_of_bytes_whoever_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read in place, copied, through a daemon, and computed from the daemon's copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    array_file(tmp_path / "r.bin", np.arange(64 * 512, dtype="<u4").reshape(64, 512))
    form: dict[str, Any] = {"format": "records", "record_bytes": 2048, "extent_bytes": 16384}

    def read(**more: Any) -> DataLoader:
        loader = DataLoader(open_dataset(tmp_path / "r.bin", **form), BATCH, shuffle=True, **more)
        assert len([*loader]) == 8
        return loader

    monkeypatch.setenv("CACHESVC", "off")
    direct = read()
    early = direct.state_dict()["digest"]
    expected = direct.digest().hex()
    assert early in ("", expected), "of files that are read in place, nobody has read all bytes"
    assert direct.state_dict()["digest"] == expected
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path / "node", ["--ram", "1MiB", "--extent-bytes", "16KiB"]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        through = read(num_workers=2)
        assert through.dataset.via == "daemon"  # type: ignore[attr-defined]
        assert through.state_dict()["digest"] == expected, "the daemon states digests with its grants"
        file = tmp_path / "state.json"
        file.write_text(json.dumps(through.state_dict()))
        arguments = ["--state", str(file), "--digest", "--socket", daemon.socket_dir]
        assert ordered(capsys, *arguments) == [{"digest": expected, "state": expected}]
        with Control(daemon.socket_dir) as control:
            through.dataset.close()  # type: ignore[attr-defined]
            control.evict(through.dataset.version)  # type: ignore[attr-defined]
        assert run(["order", *arguments]) == 4
        assert "8 of 8 extents are not in the daemon's cache" in capsys.readouterr().err
        assert ordered(capsys, *arguments, "--fetch") == [{"digest": expected, "state": expected}]


def test_a_state_without_a_source_needs_the_catalog_or_the_data(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = opened(folder).select([*range(0, FILES, 2), 1])
    loader = DataLoader(view, BATCH, **GIVEN)
    expected = keys_by_step(loader, 3)
    state = loader.state_dict() | {"source": ""}
    file, ids = tmp_path / "state.json", tmp_path / "ids.npy"
    file.write_text(json.dumps(state))
    arguments = ["order", "--state", str(file), "--steps", "0:3"]
    assert run(arguments) == 12, "the state does not say which part is read"
    assert "--ids" in capsys.readouterr().err
    np.save(ids, np.array([*range(0, FILES, 2), 1]))
    rows = ordered(capsys, *arguments[1:], "--ids", str(ids))
    assert [[row["key"] for row in rows if row["step"] == step] for step in range(3)] == expected
    copy = tmp_path / "copy.lmdb"
    copy.write_bytes((tmp_path / "cache" / "cachesvc" / "catalogs" / f"{view.version}.lmdb").read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert len(ordered(capsys, *arguments[1:], "--ids", str(ids), "--catalog", str(copy))) == 3 * BATCH
    assert run([*arguments, "--ids", str(ids), "--catalog", str(ids)]) == 5
    capsys.readouterr()
    assert run([*arguments, "--ids", str(ids)]) == 4
    assert "give the URIs" in capsys.readouterr().err
    assert run([*arguments, str(tmp_path), "--ids", str(ids)]) in (2, 6), "another folder"


def test_files_without_a_usable_state_are_one_clear_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = DataLoader(opened(folder), BATCH, **GIVEN)
    state = loader.state_dict()
    file = tmp_path / "file"

    def refused(content: Any, *more: str, code: int = 2) -> str:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        assert run(["order", "--state", str(file), "--steps", "0", *more]) == code
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    assert "neither JSON" in refused("{")
    assert "holds no state" in refused({"epoch": 3})
    assert "several" in refused({"train": state, "val": state | {"epoch": 1}})
    assert "has no state of a loader at 'x'" in refused({"train": state}, "--name", "x")
    assert "seed" in refused(state | {"seed": -1}, code=12)
    assert "names no dataset" in refused(state | {"source": "[]"}, code=12)
    assert "100 samples" in refused(state | {"samples": 100}, code=12)
    assert "no such part" in refused(state, "--rank", "7", "--world", "2")
    assert "Give --world" in refused(state, "--rank", "7")
    wrapped: DataLoader = DataLoader(torch.utils.data.ConcatDataset([opened(folder)] * 2), BATCH, **GIVEN)
    assert "samples_of" in refused(wrapped.state_dict(), code=12)
    file.write_text(json.dumps({"train": state, "val": state | {"epoch": 1}}))
    assert run(["order", "--state", str(file), "--steps", "0:2", "--name", "val"]) == 0
    assert run(["order", "--state", str(tmp_path / "none"), "--steps", "0"]) == 4
    assert run(["order", "--state", str(tmp_path), "--steps", "0"]) == 2
    assert run(["order", "--state", str(file)]) == 2
    assert run(["order", "--state", str(file), "--steps", "7:3"]) == 2
    assert run(["order", "--state", str(file), "--name", "val", "--key", "no/such"]) == 4
