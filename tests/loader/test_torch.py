"""torch's own behaviours hold, and what people write with them."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # before Python 3.11 not the builtin
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    DaemonUnavailable,
    InvalidInput,
    NotFound,
    SourceUnavailable,
    StateMismatch,
)
from loader import DataLoader, mix, open_dataset, pack
from testbed import WAIT_S
from testbed.servers import SeaweedFS
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path / "nobody"))
    return tmp_path


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    root = tmp_path_factory.mktemp("records")
    datasets.array_file(root / "r.bin", np.arange(100 * 4, dtype="<f4").reshape(100, 4))
    return compiled(root / "r.bin", root, format="records", dtype="(4,)f4")


def test_other_datasets_behave_as_in_torch() -> None:
    pairs = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    ours = list(DataLoader(pairs, batch_size=4))
    theirs = list(torch.utils.data.DataLoader(pairs, batch_size=4))
    assert all(
        torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )
    loader = DataLoader(pairs)
    with pytest.warns(UserWarning, match="runs as torch's own"):
        state = loader.state_dict()
    with pytest.warns(UserWarning, match="begins anew"):
        loader.load_state_dict(state)
    with pytest.raises(StateMismatch):
        loader.load_state_dict({"version": 2})
    with pytest.raises(StateMismatch, match="TensorDataset is no map-style dataset of open_dataset"):
        loader.skip(1)


class Counting(IterableDataset[int]):
    """An iterable dataset of a user."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(5))


def test_iterable_datasets_behave_as_in_torch() -> None:
    assert [b.tolist() for b in DataLoader(Counting(), batch_size=2)] == [[0, 1], [2, 3], [4]]


def test_a_sampler_of_the_users_own_is_obeyed(link: MemoryLink) -> None:
    dataset = in_memory(link)
    for loader in (
        DataLoader(dataset, batch_size=3, sampler=[5, 1, 9, 9]),
        DataLoader(dataset, batch_sampler=[[5, 1, 9], [9]]),
        torch.utils.data.DataLoader(dataset, batch_size=3, sampler=[5, 1, 9, 9]),
    ):
        assert [(b[:, 0] / 4).int().tolist() for b in loader] == [[5, 1, 9], [9]]
    nested = BatchSampler(SequentialSampler(dataset), 50, False)
    assert len(list(DataLoader(dataset, batch_sampler=nested, num_workers=1))) == 2


def test_an_epoch_reaches_the_users_sampler(link: MemoryLink) -> None:
    sampler = DistributedSampler(in_memory(link), 2, 0)
    batches = BatchSampler(SequentialSampler(sampler), 50, False)
    batches.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]
    for epoch, given in ((3, {"sampler": sampler}), (4, {"batch_sampler": batches})):
        DataLoader(in_memory(link), **given).set_epoch(epoch)  # type: ignore[arg-type]
        assert sampler.epoch == epoch
    DataLoader(in_memory(link), batch_sampler=BatchSampler(sampler, 50, False)).set_epoch(5)
    assert sampler.epoch == 5


def test_plain_torch_reads_our_datasets_in_workers(link: MemoryLink) -> None:
    batches = list(torch.utils.data.DataLoader(in_memory(link), batch_size=30, num_workers=2))
    assert torch.equal(torch.cat(batches), torch.arange(400.0).reshape(100, 4))


def test_collate_fn_gets_the_samples(link: MemoryLink) -> None:
    loader = DataLoader(in_memory(link), batch_size=40, collate_fn=len)
    assert list(loader) == [40, 40, 20]


def test_every_argument_is_an_attribute(link: MemoryLink) -> None:
    given: dict[str, Any] = {
        "seed": 3,
        "epochs": None,
        "last": "drop",
        "window": 4096,
        "rank": 0,
        "world_size": 1,
    }
    given |= {"shard": False, "on_error": "raise", "dp_dims": ("dp",), "mesh": None, "global_batch_size": 8}
    given |= {"batch_size": 4, "shuffle": True, "num_workers": 0, "drop_last": False, "pin_memory": False}
    loader = DataLoader(in_memory(link), **given)
    assert {name: getattr(loader, name) for name in given} == given
    assert isinstance(loader, torch.utils.data.DataLoader)


def test_concatenations_are_sharded_whole(link: MemoryLink) -> None:
    both = ConcatDataset([in_memory(link), in_memory(link)])
    loaders = [DataLoader(both, batch_size=10, shuffle=True, rank=r, world_size=2) for r in range(2)]
    found = torch.cat([batch for loader in loaders for batch in loader])
    assert torch.equal(found[:, 0].sort().values, torch.arange(0.0, 400, 4).repeat_interleave(2))


def announce(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    torch.set_num_threads(1)


def test_worker_init_runs_and_pinning_without_a_device_does_nothing(link: MemoryLink) -> None:
    loader = DataLoader(
        in_memory(link), batch_size=50, num_workers=2, worker_init_fn=announce, pin_memory=True
    )
    assert torch.equal(torch.cat(list(loader)), torch.arange(400.0).reshape(100, 4))


def explode(sample: torch.Tensor) -> torch.Tensor:
    raise CorruptData("sample 0 is broken; mend it")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_in_workers_keep_their_type(link: MemoryLink, workers: int) -> None:
    with pytest.raises(CorruptData, match="mend"):
        list(DataLoader(in_memory(link, transform=explode), num_workers=workers))


def spoilt(sample: torch.Tensor) -> torch.Tensor:
    if sample[0] == 4 * 7:
        raise KeyError("spoilt")
    return sample


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
@pytest.mark.parametrize(
    "form", [{"transform": spoilt}, {"decode": lambda raw: spoilt(np.frombuffer(raw, "<f4"))}]
)
def test_what_a_users_callable_raises_says_over_which_sample(
    link: MemoryLink, form: dict[str, Any], given: dict[str, Any]
) -> None:
    with pytest.raises(KeyError) as caught:
        list(DataLoader(in_memory(link, **form), batch_size=10, **given))
    said = "".join(traceback.format_exception(caught.value))
    assert "spoilt" in said
    assert re.search(r"over r\.bin:7 in file://.*/r\.bin", said)


def noisy(sample: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return sample[:1] + float(rng.random())


def test_augmentation_is_the_same_at_any_worker_count_and_differs_by_epoch(link: MemoryLink) -> None:
    def epochs(workers: int) -> list[torch.Tensor]:
        dataset = in_memory(link, transform=noisy)
        loader = DataLoader(dataset, batch_size=25, shuffle=True, num_workers=workers, epochs=2)
        found = torch.cat(list(loader)).reshape(2, 100)
        return [found[0], found[1]]

    alone, shared = epochs(0), epochs(2)
    assert torch.equal(torch.stack(alone), torch.stack(shared))
    assert not torch.equal(alone[0].sort().values, alone[1].sort().values)


def test_global_generators_are_left_alone(link: MemoryLink) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(DataLoader(in_memory(link), batch_size=50, shuffle=True, num_workers=1))
    assert torch.equal(before, torch.get_rng_state())


def torchs_noise(sample: torch.Tensor) -> torch.Tensor:
    return torch.rand(1)  # as torchvision's transforms draw


def test_workers_of_different_ranks_do_not_draw_the_same_from_torchs_generator(link: MemoryLink) -> None:
    def noise(rank: int) -> list[float]:
        dataset = in_memory(link, transform=torchs_noise)
        loader = DataLoader(dataset, batch_size=10, num_workers=1, rank=rank, world_size=2)
        return torch.cat(list(loader)).flatten().tolist()  # type: ignore[no-any-return]

    assert noise(0) == noise(0)
    assert not set(noise(0)) & set(noise(1))


def test_a_folder_of_classes_gives_values_and_class_indices(home: Path) -> None:
    datasets.write_files(
        home / "d", {f"{c}/{n}.dat": f"{c}{n}".encode() for c in ("cat", "dog") for n in range(3)}
    )
    dataset = open_dataset(home / "d", decode=None)
    assert dataset.classes == ("cat", "dog")
    assert sorted(dataset) == [
        (f"{c}{n}".encode(), i) for i, c in enumerate(("cat", "dog")) for n in range(3)
    ]
    cats = dataset.where("label == 'cat'")
    assert {label for _, label in cats} == {0}
    texts, labels = next(iter(DataLoader(dataset, batch_size=6)))
    assert len(texts) == 6
    assert labels.sum() == 3


def test_webdataset_and_mds_samples_are_dicts_by_field(home: Path) -> None:
    datasets.tar_shards(home / "tars", 2, 5, 100)
    [first, *rest] = list(open_dataset(str(home / "tars") + "/", decode=None))
    assert len(rest) == 9
    assert all(isinstance(value, bytes) for value in first.values())
    assert open_dataset(str(home / "tars") + "/", fields="jpg", decode=None)[0] == (first["jpg"],)


def test_tokens_convert_to_the_type_asked_for(home: Path) -> None:
    stream = datasets.tokens(home / "t.bin", 1000)
    dataset = open_dataset(
        home / "t.bin", format="tokens", dtype="uint16", seq_len=99, overlap=1, out="int64"
    )
    [batch] = DataLoader(dataset, batch_size=3).__iter__().__next__().split(3)
    assert batch.dtype == torch.int64
    assert batch[1].tolist() == stream[99:199].tolist()


@pytest.mark.parametrize(("dtype", "out"), [("uint16", "int8"), ("int32", "uint8"), ("float32", "int64")])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_number_that_the_type_asked_for_does_not_hold_is_refused(
    home: Path, dtype: str, out: str, workers: int
) -> None:
    stream = np.arange(400).astype(dtype)
    stream[350] = np.nan if dtype == "float32" else 300
    if dtype == "int32":
        stream[350] = -1
    datasets.array_file(home / "t.bin", stream)
    dataset = open_dataset(home / "t.bin", format="tokens", dtype=dtype, seq_len=50, out=out)
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=workers))
    assert next(batches).flatten().tolist() == list(range(100))
    with pytest.raises(InvalidInput, match="give a wider out"):
        list(batches)
    with pytest.raises(InvalidInput, match="give a wider out"):
        dataset[7]
    if dtype != "float32":
        with pytest.raises(InvalidInput, match="give a wider out"):
            pack(dataset, 400)[0]


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_numbers_of_the_other_byte_order_are_read_as_numpy_reads_them(home: Path, suffix: str) -> None:
    rows = datasets.array_file(home / f"d/a{suffix}", np.arange(60, dtype=">u4").reshape(20, 3))
    opened = open_dataset(home / "d", format="records", dtype="(3,)>u4")
    assert torch.equal(opened[7], torch.tensor(rows[7].tolist(), dtype=torch.uint32))
    assert np.array_equal(next(iter(DataLoader(opened, batch_size=20))).numpy(), rows)
    tokens = open_dataset(home / "d", format="tokens", dtype=">u4", seq_len=6)
    assert pack(tokens, 12)[1]["tokens"].tolist() == rows.ravel()[12:24].tolist()


@pytest.mark.parametrize("dtype", ["S5", "<U3", "<M8[s]", "V7"])
def test_records_that_no_tensor_holds_are_refused_in_words(home: Path, dtype: str) -> None:
    datasets.array_file(home / "d/a.npy", np.zeros(9, dtype))
    opened = open_dataset(home / "d")
    with pytest.raises(InvalidInput, match="no tensor"):
        opened[0]


@pytest.mark.parametrize("out", ["S3", "O", "nope", "(2,)i4", "i4,i4"])
def test_an_out_that_no_tensor_has_is_refused_at_opening(home: Path, out: str) -> None:
    datasets.tokens(home / "d/0.bin", 2000)
    with pytest.raises(InvalidInput, match="out="):
        open_dataset(home / "d", format="tokens", dtype="uint16", seq_len=64, out=out)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"uri": "absent"}, NotFound),
        ({"uri": "d", "format": "nonsense"}, InvalidInput),
        ({"uri": "d", "fields": ("nose",)}, InvalidInput),
    ],
)
def test_wrong_input_is_one_typed_line(home: Path, arguments: dict[str, Any], error: type[Exception]) -> None:
    datasets.write_files(home / "d", {"a.txt": b"x"})
    with pytest.raises(error) as raised:
        open_dataset(home / arguments.pop("uri"), **arguments)
    assert "\n" not in str(raised.value)


def test_several_ranks_require_a_daemon_for_remote_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    with pytest.raises(DaemonUnavailable, match="cachesvc serve"):
        open_dataset("s3://bucket/prefix/")


def test_ranks_that_nobody_told_what_to_do_without_a_daemon_hear_of_both_ways(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"CACHESVC_SOCKET": str(tmp_path), "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CACHESVC", raising=False)
    monkeypatch.setattr("loader.reading.connect.REQUIRE_S", 0.0)
    with pytest.raises(DaemonUnavailable, match=r"cachesvc serve \(a job of 2 ranks .*CACHESVC=auto"):
        open_dataset("s3://bucket/prefix/")


def test_a_policy_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("CACHESVC", "perhaps")
    with pytest.raises(InvalidInput, match="perhaps"):
        open_dataset(home)


@pytest.mark.parametrize("arguments", [{"on_error": "ignore"}, {"epochs": 0}])
def test_arguments_that_make_no_sense_are_refused(link: MemoryLink, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        DataLoader(in_memory(link), **arguments)


def test_two_words_about_the_rest_must_agree(link: MemoryLink) -> None:
    with pytest.raises(InvalidInput, match="give one of them"):
        len(DataLoader(in_memory(link), 3, last="pad", drop_last=True))
    assert len(DataLoader(in_memory(link), 3, last="drop", drop_last=True)) == 33


def test_stats_tell_waits_and_origins(link: MemoryLink) -> None:
    loader = DataLoader(in_memory(link), batch_size=10)
    list(loader)
    stats = loader.stats()
    assert (stats.steps, stats.samples) == (10, 100)
    assert stats.bytes_by_origin == {"ram": 1600, "nvme": 0, "direct": 0, "local": 0}
    assert 0 < stats.wait_p50_s <= stats.wait_p99_s <= stats.wait_s <= stats.elapsed_s


def test_a_bucket_is_read_without_a_daemon(
    s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    rows = np.random.default_rng(0).integers(0, 256, (300, 1000), np.uint8)
    s3_server.client().put_object(Bucket=bucket, Key="data/r.bin", Body=rows.tobytes())
    uri = f"s3://{bucket}/data/r.bin"
    dataset = open_dataset(uri, format="records", record_bytes=1000, extent_bytes=40960)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    for _ in range(2):
        for batch in loader:
            assert (batch.numpy() == rows[loader.indices]).all()
    stats = loader.stats()
    assert (stats.samples, stats.bytes_by_origin["direct"]) == (300, 300_000)
    dataset.close()
    assert loader.stats() == stats, "what was read stays read"
    assert sum(1 for _ in loader) == len(loader)
    assert loader.stats().bytes_by_origin["direct"] == 300_000


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 1, "worker_type": "thread"}])
def test_of_two_iterations_at_once_the_older_one_says_so(link: MemoryLink, more: dict[str, Any]) -> None:
    loader = DataLoader(in_memory(link), batch_size=10, **more)
    first = iter(loader)
    next(first)
    assert len(list(loader)) == 10
    with pytest.raises(InvalidInput, match="a newer iteration"):
        next(first)
    with pytest.raises(InvalidInput, match="a newer iteration"):
        list(zip(loader, loader, strict=True))
    assert len(list(loader)) == 10


def test_an_iteration_is_as_long_as_its_loader_was_when_it_began(link: MemoryLink) -> None:
    for loader_type in (torch.utils.data.DataLoader, DataLoader):
        batches = iter(loader_type(in_memory(link), 7, drop_last=True))
        assert (len(batches), len(list(islice(batches, 3))), len(batches)) == (14, 3, 14)  # type: ignore[arg-type]
    loader = DataLoader(in_memory(link), 7, epochs=2)
    loader.skip(5)
    batches = iter(loader)
    assert len(batches) == len(loader) == 30  # type: ignore[arg-type]
    assert len(list(batches)) == 25
    assert len(iter(DataLoader(in_memory(link), 7, epochs=None))) == 15  # type: ignore[arg-type]
    empty = iter(DataLoader(in_memory(link), 1000, drop_last=True))
    assert len(empty) == 0  # type: ignore[arg-type]
    assert list(empty) == []


class SpoiltOnce:
    """A transform that fails for the first record that it sees."""

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, record: torch.Tensor) -> int:
        if not self.failed:
            self.failed = True
            raise ValueError("spoilt this once")
        return int(record[0]) // 4


def test_an_older_iteration_that_is_asked_once_more_takes_no_batch_from_the_newer_one(
    link: MemoryLink,
) -> None:
    loader = DataLoader(in_memory(link, transform=SpoiltOnce()), batch_size=10)
    older = iter(loader)
    with pytest.raises(ValueError, match="spoilt this once"):
        next(older)
    newer = iter(loader)
    with pytest.raises(InvalidInput, match="a newer iteration"):
        next(older)
    assert torch.cat(list(newer)).tolist() == list(range(100))


def test_an_iteration_that_is_asked_first_after_a_newer_one_disturbs_nothing(link: MemoryLink) -> None:
    loader = DataLoader(in_memory(link), batch_size=10)
    older, newer = iter(loader), iter(loader)
    for _ in range(4):
        next(newer)
    with pytest.raises(InvalidInput, match="a newer iteration"):
        next(older)
    assert loader.stats().steps == 4
    assert len(list(newer)) == 6


@pytest.mark.parametrize("newer_takes", [0, 4, 10])
def test_an_older_iteration_says_so_wherever_the_newer_one_stands(link: MemoryLink, newer_takes: int) -> None:
    loader = DataLoader(in_memory(link), batch_size=10)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    assert len(list(islice(newer, newer_takes))) == newer_takes
    with pytest.raises(InvalidInput, match="a newer iteration"):
        next(older)


class HalvedMesh:
    """A mesh whose one dimension is not called `dp`."""

    mesh_dim_names = ("dp_shard",)

    def get_coordinate(self) -> tuple[int]:
        return (1,)

    def size(self, mesh_dim: int | None = None) -> int:
        return 2


@pytest.mark.parametrize("dims", ["dp_shard", ["dp_shard"]])
def test_one_dimension_of_a_mesh_is_a_name_like_a_list_of_one(link: MemoryLink, dims: Any) -> None:
    loader = DataLoader(in_memory(link), batch_size=25, mesh=HalvedMesh(), dp_dims=dims)
    assert [int(batch[0, 0]) // 4 for batch in loader] == [25, 75]


class OneByOne(Dataset[Any]):
    """A user's dataset that says it is not to be asked for several samples at once."""

    __getitems__ = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def test_a_dataset_without_getitems_is_asked_one_by_one(link: MemoryLink) -> None:
    found = torch.cat(list(DataLoader(OneByOne(in_memory(link)), batch_size=30)))
    assert torch.equal(found, torch.arange(400.0).reshape(100, 4))


class Spoilt:
    """A transform that fails for some records."""

    def __call__(self, record: torch.Tensor) -> int:
        number = int(record[0]) // 4
        if number in (3, 4, 61):
            raise ValueError(f"record {number} is spoilt")
        return number


MADE_BY: list[dict[str, Any]] = [
    {},
    {"pin_memory": True},
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "thread"},
]


@pytest.mark.parametrize("given", MADE_BY)
def test_who_goes_on_after_an_exception_gets_the_next_batch_as_from_torch(
    link: MemoryLink, given: dict[str, Any]
) -> None:
    def gone_on(loader: Any) -> list[list[int]]:
        found, batches = [], iter(loader)
        while True:
            try:
                found.append(next(batches).tolist())
            except StopIteration:
                return found
            except ValueError:
                found.append([])

    data = in_memory(link, transform=Spoilt())
    loader = DataLoader(data, 10, **given)
    expected = gone_on(torch.utils.data.DataLoader(data, 10))
    assert gone_on(loader) == expected
    assert loader.epoch == 1
    assert sum(not batch for batch in expected) == 2
    batches = iter(loader)
    with pytest.raises(ValueError, match="record 3 is spoilt"):
        next(batches)
    resumed = DataLoader(data, 10, **given)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="record 3 is spoilt"):
        next(iter(resumed))


@pytest.mark.parametrize("given", MADE_BY)
def test_a_skip_over_batches_that_cannot_be_made_loses_no_other(
    link: MemoryLink, given: dict[str, Any]
) -> None:
    """Those of records 3 and 4, which workers have made ahead."""
    loader = DataLoader(
        in_memory(link, transform=Spoilt()), 2, prefetch_factor=4 if "num_workers" in given else None, **given
    )
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    loader.skip(2)
    assert next(batches).tolist() == [6, 7]
    assert next(batches).tolist() == [8, 9]


@pytest.mark.parametrize("given", MADE_BY)
def test_a_batch_whose_source_was_away_is_tried_again_by_who_goes_on(
    link: MemoryLink, tmp_path: Path, given: dict[str, Any]
) -> None:
    def away(record: torch.Tensor) -> int:
        if int(record[0]) // 4 == 33 and not (tmp_path / "back").exists():
            (tmp_path / "back").touch()
            raise SourceUnavailable("away for a moment")
        return int(record[0]) // 4

    batches = iter(DataLoader(in_memory(link, transform=away), 10, **given))
    found = [next(batches) for _ in range(3)]
    with pytest.raises(SourceUnavailable, match="away"):
        next(batches)
    found += list(batches)
    assert torch.cat(found).tolist() == list(range(len(in_memory(link))))


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_that_hang_would_have_made_is_not_lost(link: MemoryLink, persistent: bool) -> None:
    def slow(record: torch.Tensor) -> int:
        number = int(record[0]) // 4
        time.sleep(8 if number == 25 else 0)
        return number

    loader = DataLoader(
        in_memory(link, transform=slow), 10, num_workers=1, timeout=4, persistent_workers=persistent
    )
    batches = iter(loader)
    assert [next(batches)[0].item() for _ in range(2)] == [0, 10]
    with pytest.raises(RuntimeError, match="timed out"):
        next(batches)
    with pytest.raises(CacheError, match="has ended with an error"):
        next(batches)
    assert loader.state_dict()["step"] == 2


def test_an_exception_that_nobody_goes_on_after_ends_the_iteration_at_once(link: MemoryLink) -> None:
    given_up = []

    class Held:
        pass

    def trained() -> weakref.ref[Held]:
        held = Held()
        data = in_memory(link, transform=Spoilt())
        loader = DataLoader(data, 10)
        feed = loader._prepared().feed
        given_up_before = feed.given_up
        feed.given_up = lambda: (given_up.append(1), given_up_before())  # type: ignore[method-assign]
        try:
            for _ in loader:
                pass
        except ValueError:
            return weakref.ref(held)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        held = trained()
        assert given_up
        assert held() is None
    finally:
        gc.enable()


def test_what_torch_alone_runs_refuses_what_it_would_not_do(link: MemoryLink) -> None:
    data = in_memory(link)
    with pytest.raises(InvalidInput, match=r"on_error= would be ignored: torch alone runs this loader"):
        DataLoader(data, 10, sampler=[1, 2, 3], on_error="skip")
    for given in ({"sampler": [1, 2]}, {"batch_sampler": [[1, 2]]}):
        with pytest.raises(InvalidInput, match="a Mixture is drawn anew in each epoch"):
            DataLoader(mix({data: 1.0}), **given)  # type: ignore[arg-type]
    drawn = DataLoader(data, 2, sampler=[1, 2])
    assert len(list(drawn)) == 1
    for ask in (lambda: drawn.valid, lambda: drawn.indices):
        with pytest.raises(InvalidInput, match="its sampler says"):
            ask()
    assert len(list(DataLoader(data, batch_size=None, sampler=[3, 4]))) == 2
    assert len(list(DataLoader(data, batch_sampler=[[3, 4]]))) == 1


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 1, "worker_type": "thread"}])
def test_threads_that_share_an_iteration_get_each_batch_once(link: MemoryLink, more: dict[str, Any]) -> None:
    batches = iter(DataLoader(in_memory(link), batch_size=5, shuffle=True, **more))
    seen: list[list[float]] = []

    def take() -> None:
        seen.extend(batch[:, 0].tolist() for batch in batches)

    with ThreadPoolExecutor(4) as pool:
        for taken in [pool.submit(take) for _ in range(4)]:
            taken.result(WAIT_S)
    assert sorted(value for batch in seen for value in batch) == [4.0 * number for number in range(100)]


def test_who_asks_while_another_thread_makes_a_batch_waits_and_who_asks_inside_hears_so(
    link: MemoryLink,
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(samples: list[Any]) -> int:
        inside.set()
        assert go_on.wait(WAIT_S)
        return len(samples)

    batches = iter(DataLoader(in_memory(link), batch_size=50, collate_fn=slow))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(next, batches)
        assert inside.wait(WAIT_S)
        second = pool.submit(next, batches)
        with pytest.raises(FutureTimeout):
            second.result(0.2)
        go_on.set()
        assert (first.result(WAIT_S), second.result(WAIT_S)) == (50, 50)
    batches = iter(DataLoader(in_memory(link), batch_size=50, collate_fn=lambda _: next(batches)))
    with pytest.raises(ValueError, match="already executing"):
        next(batches)
