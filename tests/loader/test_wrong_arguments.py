"""Numbers that no dataset and no loader can have are refused where they are given, in one typed line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.errors import InvalidInput, SourceChanged
from loader import DataLoader, Dataset, mix, open_dataset, pack
from loader.datasets.dataset import NOTES_LOGGED
from testbed.node import Daemon
from tests.support import datasets
from tests.support.training.loader_fakes import in_memory, numbered_records

RECORDS = 12
RECORD: dict[str, Any] = {"format": "records", "record_bytes": 4096}
OPENINGS: dict[str, dict[str, Any]] = {
    "record_bytes": {"format": "records"},
    "extent_bytes": RECORD,
    "header_bytes": RECORD,
    "seq_len": {"format": "tokens", "dtype": "uint16"},
    "overlap": {"format": "tokens", "dtype": "uint16", "seq_len": 64},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("arguments")
    datasets.records(root / "data" / "0.bin", RECORDS, 4096)
    return root / "data"


@pytest.fixture(scope="module")
def socket_dir(data: Path) -> Iterator[str]:
    with Daemon(data.parent / "node", ["--ram", "64MiB", "--fillers", "1"], {}) as daemon:
        yield daemon.socket_dir


@pytest.fixture(params=["daemon", "direct"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read through the daemon, and directly."""
    if request.param == "daemon":
        monkeypatch.setenv("CACHESVC_SOCKET", request.getfixturevalue("socket_dir"))
    monkeypatch.setenv("CACHESVC", "require" if request.param == "daemon" else "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize("given", [-1, 2**63, 2**64, 4096.0, "4096", None, True])
def test_a_wrong_size_is_refused_at_opening(data: Path, name: str, given: Any) -> None:
    with pytest.raises(InvalidInput, match=name) as caught:
        open_dataset(data, **{**OPENINGS[name], name: given})
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", OPENINGS)
def test_the_largest_size_is_answered_in_one_typed_line_or_fits(data: Path, name: str) -> None:
    largest = {**OPENINGS[name], name: 2**40}
    if name == "extent_bytes":
        assert len(open_dataset(data, **largest)) == RECORDS
    elif name == "header_bytes":
        with pytest.raises(InvalidInput, match="49,152 bytes, fewer than header_bytes"):
            open_dataset(data, **largest)
    else:
        with pytest.raises(FileNotFoundError, match="no whole sample in 49,152 bytes; give a smaller"):
            open_dataset(data, **largest)


@pytest.mark.usefixtures("way")
def test_numpys_integers_are_sizes(data: Path) -> None:
    assert len(open_dataset(data, format="records", record_bytes=np.int64(4096))) == RECORDS


@pytest.mark.usefixtures("way")
def test_types_of_numpy_and_torch_are_those_of_their_names(data: Path) -> None:
    named = open_dataset(data, format="tokens", dtype="uint16", seq_len=64, out="int64")
    for dtype, out in (
        (np.uint16, np.int64),
        (np.dtype("uint16"), np.dtype("int64")),
        (torch.uint16, torch.int64),
    ):
        given = open_dataset(data, format="tokens", dtype=dtype, seq_len=64, out=out)
        assert given.version == named.version
        assert given[0].dtype == torch.int64
    swapped = open_dataset(data, format="records", dtype=np.dtype(((">u2"), (2048,))))
    assert swapped.version == open_dataset(data, format="records", dtype="(2048,)>u2").version
    with pytest.raises(InvalidInput, match=r"dtype=3\.5 is not a type of numbers"):
        open_dataset(data, format="records", dtype=3.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="bfloat16"):
        open_dataset(data, format="records", dtype=torch.bfloat16)


def test_a_path_below_home_is_what_the_commands_take_it_for(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("HOME", str(data.parent))
    assert len(open_dataset(f"~/{data.name}", **RECORD)) == RECORDS
    with pytest.raises(FileNotFoundError, match=f"{data.parent}/nope: no such"):
        open_dataset("~/nope")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("given", [{"version": 3}, {"fields": 3}])
def test_a_version_and_fields_are_text(data: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"{next(iter(given))}=3: give"):
        open_dataset(data, **RECORD, **given)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "given", [{"labels": "\udcff.csv"}, {"dtype": "\ud800"}, {"format": "\udcff"}, {"version": "\ud800"}]
)
def test_text_that_no_message_can_hold_is_refused(data: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="give it as text"):
        open_dataset(data, **given)


@pytest.mark.usefixtures("way")
def test_a_version_that_is_gone_is_an_error_that_names_the_remedy(data: Path) -> None:
    with pytest.raises(SourceChanged, match=r"not 0123; open it without version="):
        open_dataset(data, **RECORD, version="0123")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("long", ["x" * 20_000, "é" * 20_000])
def test_an_error_with_a_long_message_stays_typed(data: Path, long: str) -> None:
    with pytest.raises(InvalidInput, match=r"^unknown format.*there are: files, .*images, webdataset"):
        open_dataset(data, format=long)


@pytest.mark.parametrize("given", [{"decode": "pil"}, {"decode": False}, {"decode": True}, {"transform": 3}])
def test_a_value_that_is_not_callable_is_refused_at_opening(
    data: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    with pytest.raises(InvalidInput, match=f"{next(iter(given))}=.*function of the sample"):
        open_dataset(data, **RECORD, **given)


@pytest.mark.usefixtures("way")
def test_data_left_out_is_logged_briefly_at_each_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(NOTES_LOGGED + 2):
        datasets.write_files(tmp_path / "tails", {f"{number:02d}.bin": bytes(4097)})
    for _ in range(2):
        caplog.clear()
        assert len(open_dataset(tmp_path / "tails", **RECORD)) == NOTES_LOGGED + 2
        said = [record.getMessage() for record in caplog.records if record.name == "cachesvc"]
        assert all(f"{number:02d}.bin" in said[number] for number in range(NOTES_LOGGED))
        assert said[NOTES_LOGGED:] == ["and 2 notes more, in ds.catalog.notes"]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return in_memory(numbered_records(tmp_path_factory.mktemp("numbers"), RECORDS))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seed": "a"}, "seed='a'"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"seed": None}, "seed=None"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"last": "maybe"}, "last='maybe': give one of 'drop'"),
        ({"window": "some"}, "window='some'"),
        ({"window": 0}, "window=0"),
        ({"window": -5}, "window=-5"),
        ({"window": 1e6}, "window=1000000.0"),
        ({"rank": 0}, "give both or neither"),
        ({"world_size": 2}, "give both or neither"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": -1, "world_size": 2}, "rank -1 of 2"),
        ({"rank": 0, "world_size": 0}, "rank 0 of 0"),
        ({"rank": "0", "world_size": 1}, "rank='0'"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": -4}, "global_batch_size=-4"),
        ({"global_batch_size": 4.0}, "global_batch_size=4.0"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"peer_failure_s": 0}, "peer_failure_s=0"),
        ({"peer_failure_s": "30"}, "peer_failure_s='30'"),
    ],
)
def test_senseless_arguments_of_a_loader_are_refused(
    numbers: Dataset, arguments: dict[str, Any], says: str
) -> None:
    for dataset in (numbers, TensorDataset(torch.arange(4))):
        with pytest.raises(InvalidInput) as caught:
            DataLoader(dataset, batch_size=4, **arguments)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_numpys_integers_make_a_loader_whose_state_is_plain(numbers: Dataset) -> None:
    made = {"seed": np.uint64(2**64 - 1), "global_batch_size": np.int32(4), "window": np.int64(4096)}
    batches = DataLoader(numbers, batch_size=2, rank=np.int64(0), world_size=np.int64(2), **made)
    state = batches.state_dict()
    assert (state["seed"], state["global_batch"]) == (2**64 - 1, 4)
    assert {type(value) for value in state.values()} <= {int, str, bool}
    assert len(list(batches)) == 3


def test_an_index_is_a_whole_number_as_for_lists(numbers: Dataset) -> None:
    indices: tuple[Any, ...] = (1, np.int64(-1), np.uint8(2), torch.tensor(3))
    assert [int(numbers[at]) for at in indices] == [1, RECORDS - 1, 2, 3]
    mixed, packs = mix({numbers: 1.0}), pack(numbers, 2)
    assert int(mixed[np.int64(0)]) == int(mixed[-RECORDS]) == 0
    for indexed in (numbers, mixed, packs):
        for wrong in (1.5, np.float64(1), "1", None, slice(0, 2)):
            with pytest.raises(TypeError, match=r"take\(n\).*select\(ids\)"):
                indexed[wrong]  # type: ignore[index]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([0.5], "float64"),
        ([True, False], "np.flatnonzero"),
        ([-1, 3], "sample -1 of 12"),
        ([3, 12], "sample 12 of 12"),
        (np.asarray([2**64 - 1], np.uint64), "sample 18446744073709551615 of 12"),
    ],
)
def test_a_selection_is_of_indices_that_exist(numbers: Dataset, ids: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        numbers.select(ids)


def test_an_empty_selection_and_a_part_are_datasets(numbers: Dataset) -> None:
    assert len(numbers.select([])) == len(numbers.take(0)) == 0
    assert [int(numbers.take(np.int64(2))[at]) for at in (0, 1)] == [0, 1]
    assert [len(part) for part in numbers.take(0).split({"x": 0.5, "y": 0.5}).values()] == [0, 0]
    with pytest.raises(InvalidInput, match="take=-1"):
        numbers.take(-1)


def test_an_empty_part_is_warned_of_and_has_no_samples(numbers: Dataset) -> None:
    with pytest.warns(
        UserWarning, match=r"^7 samples are too few for 'val' of \{'train': 0.98, 'val': 0.02\}: "
    ):
        val = numbers.take(7).split({"train": 0.98, "val": 0.02})["val"]
    assert list(DataLoader(val, batch_size=2)) == []
    parts: tuple[TorchDataset[Any], ...] = (val, Subset(numbers, []), ConcatDataset([val, val]))
    for empty in parts:
        with pytest.raises(InvalidInput, match="has no samples to shuffle") as refused:
            DataLoader(empty, batch_size=2, shuffle=True)
        assert "\n" not in str(refused.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not numbers.split({"all": 1, "none": 0})["none"]


WRONG: dict[str, Callable[[Dataset], object]] = {
    r"fractions['x']=nan": lambda data: data.split({"x": float("nan")}),
    r"fractions['x']='y'": lambda data: data.split({"x": "y"}),  # type: ignore[dict-item]
    r"fractions['x']=None": lambda data: data.split({"x": None}),  # type: ignore[dict-item]
    r"fractions['x']=-0.5": lambda data: data.split({"x": -0.5}),
    r"fractions=[0.5, 0.5]": lambda data: data.split([0.5, 0.5]),  # type: ignore[arg-type]
    "give at least one, and at most 1 in total": lambda data: data.split({"x": 0.7, "y": 0.7}),
    "seed='a'": lambda data: data.split({"x": 1}, seed="a"),  # type: ignore[arg-type]
    "seed=1.5": lambda data: data.split({"x": 1}, seed=1.5),  # type: ignore[arg-type]
    "seed=-1": lambda data: data.split({"x": 1}, seed=-1),
    "]='x': give a number": lambda data: mix({data: "x"}),  # type: ignore[dict-item]
    "size='all'": lambda data: mix({data: 1}, size="all"),  # type: ignore[arg-type]
    "size=True": lambda data: mix({data: 1}, size=True),
    "size=1180591620717411303424": lambda data: mix({data: 1}, size=2**70),
    "]=inf: give a number": lambda data: mix({data: 1e999}),
    "]=-1: give a number": lambda data: mix({data: -1}),
    "weights=[Dataset(": lambda data: mix([data, data]),  # type: ignore[arg-type]
    "weights=None": lambda data: mix({data: 1}).reweighed(None, 1),  # type: ignore[arg-type]
    "is not among the 1 mixed datasets": lambda data: mix({data: 1}).reweighed({data.take(2): 1}, 1),
    "]='y': give a number": lambda data: mix({data: 1}).reweighed({data: "y"}, 1),  # type: ignore[dict-item]
    "epoch='3'": lambda data: mix({data: 1}).reweighed({data: 2}, "3"),  # type: ignore[arg-type]
    "epoch=1.5": lambda data: mix({data: 1}).reweighed({data: 2}, 1.5),  # type: ignore[arg-type]
    "one list of indices": lambda data: data.select([[1], [2, 3]]),  # type: ignore[list-item]
    "verify='no': give True": lambda data: open_dataset(data.catalog.uri, verify="no"),  # type: ignore[arg-type]
    "shard='no': give True": lambda data: DataLoader(data, shard="no"),  # type: ignore[arg-type]
    "log_stats='no': give True": lambda data: DataLoader(data, log_stats="no"),  # type: ignore[arg-type]
    "dp_dims=5": lambda data: DataLoader(data, dp_dims=5),  # type: ignore[arg-type]
    "seq_len=2.5": lambda data: pack(data, 2.5),  # type: ignore[arg-type]
    "seq_len=0": lambda data: pack(data, 0),
    "packs of 99 tokens": lambda data: pack(data, 99),
    "dtype='zz'": lambda data: pack(data, 2, dtype="zz"),
    "not documents of int16": lambda data: pack(data, 2, dtype="int16"),
    "not list": lambda data: pack([data], 2),  # type: ignore[arg-type]
    "write it like label == 'cat'": lambda data: data.where("key = 'x'"),
    "not NoneType": lambda data: data.where(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_shares_lengths_and_types_are_refused(numbers: Dataset, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        WRONG[says](numbers)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numpys_and_torchs_numbers_are_shares(numbers: Dataset) -> None:
    assert len(numbers.split({"x": np.float32(0.5)})["x"]) == RECORDS // 2
    assert len(mix({numbers: 1}, size=np.int64(5))) == 5
    assert len(mix({numbers: torch.tensor(2.0)})) == RECORDS  # type: ignore[dict-item]
