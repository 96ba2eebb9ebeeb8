"""Samples of uneven size as one tensor: the same bytes from any worker and any kind of extent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset
from torch.utils.data import DataLoader as TorchDataLoader

from cachesvc.core.errors import InvalidInput
from loader import DataLoader, Jagged, jagged, mix
from loader.datasets.samples.kinds import sample_reader
from loader.datasets.samples.sample_form import SampleSpec
from loader.reading.opened_dataset import OpenedDataset
from loader.reading.reader import ExtentReader
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryGrants, MemoryLink, compiled, in_memory

Blobs = tuple[MemoryLink, dict[str, bytes]]


def parts(batch: Jagged) -> list[bytes]:
    assert type(batch) is Jagged
    assert batch.values.dtype == torch.uint8
    assert batch.offsets.dtype == torch.int64
    return [view.numpy().tobytes() for view in batch.unbind()]


def wanted(blobs: Blobs, loader: DataLoader) -> list[bytes]:
    link, files = blobs
    catalog = link.catalog()
    return [files[catalog.key(int(n))] for n in loader.indices]


@pytest.mark.parametrize("origin", ["ram", "nvme"])
@pytest.mark.parametrize(("limit", "room"), [(1 << 30, 999), (20_000, 999), (9000, 4), (0, 4)])
def test_ranges_are_joined_from_extents_of_any_kind(blobs: Blobs, origin: str, limit: int, room: int) -> None:
    link, files = blobs
    opened = OpenedDataset(link)  # type: ignore[arg-type]
    catalog = opened.catalog
    grants = MemoryGrants(catalog.extent, origin, room)
    reader = ExtentReader(catalog, grants, limit)
    samples = sample_reader(catalog, SampleSpec(decode=None)).gather(jagged)
    assert samples is not None
    memory = np.full(1 << 21, 7, np.uint8)
    rng = np.random.default_rng(3)
    read = 0
    for count in (1, 5, 40, 200):
        ids = rng.integers(0, catalog.samples, count)
        expected = [files[catalog.key(int(n))] for n in ids]
        for empty in (None, lambda size: memory[:size]):
            assert parts(samples.make(reader, samples.locate(reader, ids), empty)) == expected
            read += sum(map(len, expected))
    assert sum(reader.origin_bytes().values()) == reader.origin_bytes()[origin] == read
    reader.close()
    assert not grants.leases


@pytest.mark.parametrize("form", [{"decode": None}, {"decode": None, "transform": bytes}])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}])
@pytest.mark.parametrize("last", ["drop", "pad", "short"])
def test_batches_are_the_same_with_any_workers(
    blobs: Blobs, form: dict[str, Any], workers: dict[str, Any], last: str
) -> None:
    ends: dict[str, dict[str, Any]] = {
        "drop": {"last": "drop"},
        "pad": {"rank": 0, "world_size": 1, "last": "pad"},
        "short": {},
    }
    given = ends[last] | workers
    loader = DataLoader(in_memory(blobs[0], **form), 8, shuffle=True, collate_fn=jagged, **given)
    seen: list[int] = []
    for batch in loader:
        assert parts(batch) == wanted(blobs, loader)
        seen += loader.indices[: loader.valid].tolist()
    assert len(set(seen)) == len(seen) == (56 if last == "drop" else 61)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}])
def test_one_named_field_is_joined_and_an_absent_one_is_empty(
    tmp_path: Path, workers: dict[str, Any]
) -> None:
    samples = {
        f"{n:02d}": {"cls": b"7", "jpg": b"%02d" % n * n} if n % 4 else {"cls": b"7"} for n in range(20)
    }
    datasets.write_files(tmp_path / "tars", {"0.tar": datasets.tar_bytes(samples)})
    link = compiled(tmp_path / "tars", tmp_path, format="webdataset")
    dataset = in_memory(link, fields=("jpg",), decode=None)
    joined = [samples[dataset.catalog.key(n)].get("jpg", b"") for n in range(20)]
    assert dataset[1] == (joined[1],)
    assert dataset.sample_reader.gather(jagged) is not None
    assert in_memory(link, fields=("jpg", "cls"), decode=None).sample_reader.gather(jagged) is None
    twice: ConcatDataset[Any] = ConcatDataset([dataset, dataset])
    loaders = [DataLoader(given, 6, collate_fn=jagged, **workers) for given in (dataset, twice)]
    loaders += [TorchDataLoader(dataset, 6, collate_fn=jagged, **workers)]  # type: ignore[list-item]
    for loader, wanted in zip(loaders, (joined, joined * 2, joined), strict=True):
        assert [part for batch in loader for part in parts(batch)] == wanted


def test_an_empty_first_sample_requests_no_extent(tmp_path: Path) -> None:
    files = {"a.bin": b"", "b.bin": b"7" * 10_000}
    datasets.write_files(tmp_path / "data", files)
    link = compiled(tmp_path / "data", tmp_path, format="files", extent_bytes=4096)
    (batch,) = DataLoader(in_memory(link, decode=None), 2, collate_fn=jagged)
    assert parts(batch) == [*files.values()]


def test_mixtures_and_subsets_are_joined(blobs: Blobs) -> None:
    dataset = in_memory(blobs[0], decode=None)
    some = DataLoader(dataset.take(20), 4, shuffle=True, collate_fn=jagged)
    assert [len(wanted(blobs, some)) for batch in some if parts(batch) == wanted(blobs, some)] == [4] * 5
    both = mix({dataset.take(30): 0.5, dataset.select(range(30, 60)): 0.5})
    sizes = {len(file) for file in blobs[1].values()}
    assert {len(part) for batch in DataLoader(both, 6, collate_fn=jagged) for part in parts(batch)} <= sizes


@given(
    st.lists(st.integers(0, 5), max_size=8),
    st.sampled_from(["bytes", "int32", "float64", "bfloat16"]),
    st.sampled_from([(), (3,)]),
)
def test_jagged_collates_values_of_each_kind(sizes: list[int], kind: str, rest: tuple[int, ...]) -> None:
    if kind == "bytes":
        samples: list[Any] = [bytes(range(size)) for size in sizes]
        tensors = [torch.tensor(list(sample), dtype=torch.uint8) for sample in samples]
    elif kind == "bfloat16":
        samples = tensors = [torch.ones((size, *rest), dtype=torch.bfloat16) for size in sizes]
    else:
        samples = [np.arange(size * int(np.prod(rest))).astype(kind).reshape(size, *rest) for size in sizes]
        tensors = [torch.from_numpy(sample) for sample in samples]
    found = jagged(samples)
    assert found.offsets.tolist() == [0, *np.cumsum(sizes).tolist()]
    for view, tensor in zip(found.unbind(), tensors, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)
    if sizes and sum(sizes):
        assert [part.shape for part in found.nested().unbind()] == [tensor.shape for tensor in tensors]


@pytest.mark.parametrize(
    "value",
    [b"ab", np.arange(3, dtype="i2"), np.ones((2, 3)), torch.ones(2)],
    ids=["bytes", "row", "rows", "tensor"],
)
def test_an_absent_field_is_empty_among_values_of_any_kind(value: Any) -> None:
    found = jagged([(None,), (value,), (None,)])
    assert found.offsets.tolist() == [0, 0, len(value), len(value)]
    assert found.values.dtype == jagged([value]).values.dtype
    assert torch.equal(found.values, jagged([value]).values)
    assert jagged([(None,), (None,)]).offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "samples",
    [
        [3, 4],
        [(None,), ("a",)],
        [(None,), (np.zeros(()),)],
        [(np.zeros(2),), (None,), (b"a",)],
        ["a"],
        [{"x": b""}],
        [np.zeros(())],
        [np.zeros((2, 3)), np.zeros(2)],
        [np.zeros(2), np.zeros(2, int)],
        [b"a", np.zeros(1)],
        [(b"a",), b"b"],
        [(b"a", b"b")],
        [None, b"a"],
        [np.array(["a"])],
    ],
)
def test_samples_that_cannot_be_joined_are_refused(samples: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="collate_fn=jagged takes"):
        jagged(samples)
