"""A run's digest: the same at any number of ranks and workers, over resumes, and for what the order says; another one for
anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.sample_places import SamplePlace
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.digests import SampleSum, parse_sum, sum_of, sum_of_parts
from cachesvc.tiers.checksum import block_digest
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES, Checksums
from loader import DataLoader, mix, pack
from loader.batches.digest import fold
from tests.support.training.loader_fakes import (
    MemoryLink,
    extent_bytes,
    in_memory,
    in_step,
    loaders_of_ranks,
    wide_records,
)
from tests.support.training.mixtures import mixture_data, numbers, text

COUNT, BATCH = 203, 24
GIVEN: dict[str, Any] = {"shuffle": True, "window": 16384, "global_batch_size": BATCH, "epochs": 2}
FIRSTS = np.array([0, 10, 10, 57, 90])


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    return wide_records(tmp_path_factory.mktemp("records"), COUNT)


def ranks(link: MemoryLink, world: int, workers: int = 0, **more: Any) -> list[DataLoader]:
    return loaders_of_ranks(link, BATCH, world, workers, **{"window": 16384, "epochs": 2} | more)


def parts(loaders: list[DataLoader]) -> SampleSum:
    """The sum of what these ranks handed over."""
    return sum((fold(loader._progress.handed, loader.dataset) for loader in loaders), SampleSum())


def contents_of(extents: Any) -> list[bytes]:
    return [bytes([extent]) * 16 for extent in extents.tolist()]


def contents_in(dataset: Any) -> Callable[[Any], list[bytes]]:
    """The digests of a dataset's extents, from the bytes of its file."""

    def found(extents: Any) -> list[bytes]:
        each = [extent_bytes(dataset.catalog.extent(extent)) for extent in extents.tolist()]
        return [Checksums(len(raw), b"".join(map(block_digest, _blocks(raw)))).content for raw in each]

    return found


def _blocks(raw: bytes) -> Iterator[bytes]:
    return (raw[at : at + CHECKSUM_BLOCK_BYTES] for at in range(0, len(raw), CHECKSUM_BLOCK_BYTES))


@given(st.lists(st.integers(0, 89), max_size=200), st.data())
def test_a_sum_depends_on_its_samples_and_not_on_their_order(samples: list[int], data: st.DataObject) -> None:
    given_ = np.array(samples, np.int64)
    whole = sum_of(given_, FIRSTS, contents_of)
    mixed = np.array(data.draw(st.permutations(samples)), np.int64)
    cut = data.draw(st.integers(0, len(samples)))
    assert sum_of(mixed[:cut], FIRSTS, contents_of) + sum_of(mixed[cut:], FIRSTS, contents_of) == whole
    assert parse_sum(whole.digest.hex()) == whole
    assert len(whole.digest) == 32
    other = data.draw(st.integers(0, 89))
    assert sum_of(np.append(given_, other), FIRSTS, contents_of) != whole
    if samples:
        assert sum_of(given_[1:], FIRSTS, contents_of) != whole
        assert sum_of(given_, FIRSTS, lambda extents: contents_of(extents + 100)) != whole, "other bytes"


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (4, 0)])
def test_parts_of_ranks_add_up_to_the_digest_of_one_rank(link: MemoryLink, world: int, workers: int) -> None:
    (one,) = ranks(link, 1)
    in_step([one])
    both = sum_of(np.arange(COUNT), one.dataset.catalog.extent_first, contents_in(one.dataset))  # type: ignore[attr-defined]
    assert one.digest() == (both + both).digest
    loaders = ranks(link, world, workers)
    in_step(loaders)
    assert parts(loaders) == both + both


def test_a_resumed_run_goes_on_with_the_digest_of_its_state(link: MemoryLink) -> None:
    (whole,) = ranks(link, 1, skip_steps=[(2, 4)], exclude=["r.bin:5"])
    in_step([whole])
    (first,) = ranks(link, 1, skip_steps=[(2, 4)], exclude=["r.bin:5"])
    _, state = in_step([first], stop=5)
    assert state["digest"] == first.digest().hex()
    lost = iter(first)  # handed over after the state was saved, and lost with the process
    next(lost)
    (second,) = ranks(link, 1, workers=2)
    _, state = in_step([second], state, stop=4)
    (third,) = ranks(link, 1)
    in_step([third], state)
    assert third.digest() == whole.digest()
    assert first.digest() != whole.digest()
    expected = SampleSum()
    for step in range(2 * -(-COUNT // BATCH)):
        samples = np.array([each.index for each in whole.samples_of(step)], np.int64)
        expected += sum_of(samples, whole.dataset.catalog.extent_first, contents_in(whole.dataset))  # type: ignore[attr-defined]
    assert whole.digest() == expected.digest


def test_without_a_digest_in_the_state_there_is_none_after_it(link: MemoryLink) -> None:
    loaders = ranks(link, 2)
    _, state = in_step(loaders, stop=3)
    assert state["digest"] == "", "no rank knows what the others handed over"
    with pytest.raises(InvalidInput, match="process group"):
        loaders[0].digest()
    (one,) = ranks(link, 1)
    one.load_state_dict(state)
    with pytest.raises(StateMismatch, match="has no digest"):
        one.digest()
    for wrong in ("0", "zz" * 32):
        with pytest.raises(StateMismatch):
            one.load_state_dict(state | {"digest": wrong})


def test_a_substitute_changes_the_digest(link: MemoryLink) -> None:
    """It counts what was handed over, and not what the order says."""
    (plain,) = ranks(link, 1, epochs=1)
    in_step([plain])
    failing = DataLoader(
        in_memory(link, transform=_refusing), BATCH, on_error="substitute", **GIVEN | {"epochs": 1}
    )
    in_step([failing])
    assert failing.bad_samples[0].sample == 7
    assert failing.digest() != plain.digest()


def _refusing(record: Any) -> Any:
    if int(record.view(-1)[0]) == 0 and int(record.numpy().view("<u4")[0]) // 512 == 7:
        raise ValueError("seven")
    return record


def test_a_mixture_sums_the_samples_of_its_components(tmp_path: Path) -> None:
    components = numbers(mixture_data(tmp_path))
    mixed = DataLoader(mix({components[0]: 1, components[1]: 1}), 8, shuffle=True)
    total, size = SampleSum(), 0
    for _ in mixed:
        where = mixed.dataset.locate(mixed.indices[: mixed.valid])  # type: ignore[attr-defined]
        for number in range(2):
            catalog = components[number].catalog
            total += sum_of(
                where[2][where[0] == number], catalog.extent_first, contents_in(components[number])
            )
            size += int((where[0] == number).sum())
    assert mixed.digest() == total.digest
    assert size == len(mixed.dataset)  # type: ignore[arg-type]


def parts_of(place: SamplePlace, catalog: Catalog) -> Iterator[tuple[int, int, int]]:
    """The extents of stored bytes, and the addresses from which to which each has them."""
    for extent, start in enumerate(catalog.extent_starts.tolist()):
        (piece,) = catalog.extent(extent).pieces
        begin, end = max(place.begin, piece.offset), min(place.end, piece.offset + piece.length)
        if piece.object.uri == place.object and begin < end:
            yield extent, start + begin - piece.offset, start + end - piece.offset


@pytest.mark.parametrize(("fit", "mixed"), [("wrap", False), ("best", True)])
def test_packs_sum_the_parts_of_their_documents(tmp_path: Path, fit: Any, mixed: bool) -> None:
    """Each token that was handed over is in the sum, as often as it was."""
    dataset = text(mixture_data(tmp_path))
    packs = pack(dataset, 24, fit=fit, targets="shifted")
    loader = DataLoader(mix({packs: 1}) if mixed else packs, 4, shuffle=True, window=8192, epochs=2)
    steps = sum(1 for _ in loader)
    places = [place for step in range(steps) for each in loader.samples_of(step) for place in each.places]
    parts = [part for place in places for part in parts_of(place, dataset.catalog)]
    extents, *numbers = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    tokens = int((numbers[1] - numbers[0]).sum()) // 2
    assert tokens == 2 * (len(dataset) - packs.dropped_tokens), "a sample of the dataset is a token"
    assert loader.digest() == sum_of_parts(extents, numbers, contents_in(dataset)).digest
    lost = sum_of_parts(extents[1:], [each[1:] for each in numbers], contents_in(dataset))
    assert loader.digest() != lost.digest


def test_a_dataset_that_wraps_ours_has_no_digest(link: MemoryLink) -> None:
    joined: Any = ConcatDataset([in_memory(link), in_memory(link)])
    loader: DataLoader = DataLoader(joined, 8)
    next(iter(loader))
    assert loader.state_dict()["digest"] == ""
    with pytest.raises(InvalidInput, match="made of several"):
        loader.digest()


def test_noting_a_batch_takes_constant_memory(link: MemoryLink) -> None:
    (loader,) = ranks(link, 1)
    for _ in islice(loader, 8):
        assert len(loader._progress.handed.spans) == 1
