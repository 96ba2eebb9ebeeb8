"""The progress of a fill, as its writer and its readers see it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.tiers.checksum import DIGEST_BYTES, StreamedChecksums
from cachesvc.tiers.fill_progress import FillProgress, FillState, digest_of_digests
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES as BLOCK

BLOCKS = 9
SIZE = BLOCKS * BLOCK - 100


@pytest.fixture
def both() -> Iterator[tuple[FillProgress, FillProgress]]:
    """A writer's and a reader's view of one fill."""
    yield from views(SIZE)


def views(size_bytes: int) -> Iterator[tuple[FillProgress, FillProgress]]:
    fd = FillProgress.create(size_bytes)
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    writer, reader = FillProgress(fd, size_bytes), FillProgress(readable, size_bytes)
    os.close(fd)
    os.close(readable)
    yield writer, reader
    writer.close()
    reader.close()


def digest(index: int) -> bytes:
    return (index + 1).to_bytes(DIGEST_BYTES, "little")


def state(progress: FillProgress) -> FillState:
    return progress.state


def runs_of(blocks: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for index in sorted(blocks):
        if found and sum(found[-1]) == index:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return found


@given(st.permutations(range(BLOCKS)))
def test_a_reader_sees_each_block_as_it_completes(order: list[int]) -> None:
    for writer, reader in views(SIZE):
        for done, index in enumerate(order):
            assert reader.state is FillState.FILLING
            writer.add(index, digest(index))
            complete = order[: done + 1]
            assert reader.runs(0, BLOCKS) == runs_of(complete)
            assert reader.missing(BLOCKS) == runs_of(order[done + 1 :])
            assert reader.complete(index) == next(
                (run[0] + run[1] - index for run in runs_of(complete) if run[0] <= index < sum(run)), 0
            )
            assert reader.digests(index, 1) == digest(index)
        whole = b"".join(map(digest, range(BLOCKS)))
        assert writer.finish()
        assert (reader.state, reader.root) == (FillState.DONE, digest_of_digests(whole))
        assert reader.digests(0, BLOCKS) == whole


@given(st.sets(st.integers(0, BLOCKS - 1)), st.integers(0, BLOCKS), st.integers(0, BLOCKS), st.integers(1, 3))
def test_runs_stay_within_what_was_asked(complete: set[int], first: int, count: int, limit: int) -> None:
    count = min(count, BLOCKS - first)
    for writer, reader in views(SIZE):
        for index in complete:
            writer.add(index, digest(index))
        assert reader.runs(first, count) == runs_of([i for i in complete if first <= i < first + count])
        assert reader.missing(limit) == runs_of([i for i in range(BLOCKS) if i not in complete])[:limit]


def test_the_first_end_of_a_fill_stays(both: tuple[FillProgress, FillProgress]) -> None:
    writer, reader = both
    assert writer.abort()
    assert writer.abort()
    writer.add(0, b"".join(map(digest, range(BLOCKS))))
    assert not writer.finish()
    assert reader.state is FillState.ABORTED
    for done, _ in views(SIZE):
        done.add(0, b"".join(map(digest, range(BLOCKS))))
        assert done.finish()
        assert not done.abort()
        assert done.state is FillState.DONE


def test_a_block_that_changes_aborts_the_fill_for_its_readers(
    both: tuple[FillProgress, FillProgress],
) -> None:
    writer, reader = both
    writer.add(2, digest(2) + digest(3))
    writer.add(3, digest(3) + digest(4))
    assert state(reader) is FillState.FILLING
    writer.add(4, digest(0))
    assert state(reader) is FillState.ABORTED


def test_a_reader_with_a_read_only_descriptor_changes_nothing(
    both: tuple[FillProgress, FillProgress],
) -> None:
    _, reader = both
    for change in (reader.abort, lambda: reader.add(0, digest(0))):
        with pytest.raises(TypeError):
            change()
    assert reader.state is FillState.FILLING


def test_memory_of_another_extent_is_refused() -> None:
    fd = FillProgress.create(SIZE)
    with pytest.raises(ValueError, match="not the progress of"):
        FillProgress(fd, SIZE + BLOCK)
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1])
def test_extents_of_any_size_can_be_done(size: int) -> None:
    for writer, reader in views(size):
        writer.add(0, b"".join(map(digest, range(-(-size // BLOCK)))))
        assert writer.finish()
        assert reader.missing(1) == []


@given(
    st.permutations(range(6)),
    st.lists(st.integers(1, SIZE - 1), min_size=5, max_size=5, unique=True),
)
def test_streamed_checksums_mark_blocks_and_at_the_end_those_that_straddle(
    order: list[int], cuts: list[int]
) -> None:
    data = np.random.default_rng(3).bytes(SIZE)
    bounds = [0, *sorted(cuts), SIZE]
    fd = os.memfd_create("extent")
    os.pwrite(fd, data, 0)
    for writer, reader in views(SIZE):
        streamed = StreamedChecksums(SIZE, writer)
        whole = set()
        for part in order:
            begin, end = bounds[part], bounds[part + 1]
            streamed.add(begin, memoryview(data)[begin:end])
            whole |= {i for i in range(BLOCKS) if begin <= i * BLOCK and min(SIZE, (i + 1) * BLOCK) <= end}
            assert reader.runs(0, BLOCKS) == runs_of(list(whole))
        digests = streamed.checksums(fd).digests
        assert reader.missing(1) == []
        assert reader.digests(0, BLOCKS) == digests
    os.close(fd)
