"""Mixtures and packs under the DataLoader: the same global batches at any scale and after any resume, exactly once,
and typed errors before the first batch."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import CacheError, InvalidInput, StateMismatch
from cachesvc.core.order.epoch_order import Plan
from loader import DataLoader, Dataset, Mixture, Packed, mix, open_dataset, pack
from loader.datasets.samples import Form
from loader.reading.direct_access import Access
from loader.reading.opened_dataset import Opened
from tests.support.datasets import array_file, megatron, write_files
from tests.support.training.loader_fakes import MemoryGrants, MemoryLink, compiled, in_memory

SEQ = 24
GLOBAL = 16
SIZES = (40, 25, 10)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`text`: Megatron documents in two files; `notes`: raw tokens in two classes; `rows`: fixed records; `n0`...:
    records that hold their own number."""
    root, draw = tmp_path_factory.mktemp("mixtures"), np.random.default_rng(5)
    for number in range(2):
        lengths = draw.integers(1, 60, 150)
        megatron(root / "text" / f"part{number}", [draw.integers(0, 9999, n).tolist() for n in lengths])
    notes = {
        f"{name}/{number:03d}.tok": draw.integers(0, 9999, 5 + 3 * number, np.uint16).tobytes()
        for name in ("cat", "dog")
        for number in range(40)
    }
    write_files(root / "notes", notes)
    array_file(root / "rows.npy", draw.integers(0, 9999, (300, 10)).astype(np.uint16))
    for index, size in enumerate(SIZES):
        numbers = np.arange(size, dtype=np.int64)[:, None] + 1000 * index
        array_file(root / f"n{index}.npy", np.tile(numbers, (1, 512)))  # one record a page
    return root


def opened(root: Path, name: str, form: dict[str, Any] | None = None, **options: Any) -> Dataset:
    return in_memory(compiled(root / name, root, extent_bytes=4096, **options), **(form or {}))


def text(root: Path, **form: Any) -> Dataset:
    return opened(root, "text", form, format="tokens", seq_len=1)


def notes(root: Path, **form: Any) -> Dataset:
    return opened(root, "notes", {"fields": ("tok",), "decode": None} | form, format="files")


def three_packed(root: Path) -> Mixture:
    """Three packed datasets, one of them filtered."""
    parts = (
        pack(text(root), SEQ),
        pack(notes(root).where("label == 'cat'"), SEQ, dtype="uint16"),
        pack(opened(root, "rows.npy", format="records"), SEQ),
    )
    return mix(dict(zip(parts, (0.5, 0.3, 0.2), strict=True)))


def numbers(root: Path, **form: Any) -> list[Dataset]:
    """Three datasets whose samples hold 1000 * dataset + index."""
    return [opened(root, f"n{index}.npy", form, format="records") for index in range(3)]


def digests(
    make: Callable[[], Any], world: int, state: object = None, stop: int = 10**9, **more: Any
) -> tuple[list[str], dict[str, Any]]:
    """One digest a global batch, of every token and boundary in the order of the ranks, and the state after."""
    loaders = [
        DataLoader(
            make(),
            batch_size=GLOBAL // world,
            shuffle=True,
            window=8192,
            seed=3,
            last="pad",
            rank=rank,
            world_size=world,
            **more,
        )
        for rank in range(world)
    ]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
    found: list[str] = []
    iterators = [iter(loader) for loader in loaders]
    while len(found) < stop:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            break
        digest = hashlib.sha256()
        for name in ("tokens", "cu_seqlens"):
            real = zip(batches, (loader.valid for loader in loaders), strict=True)
            digest.update(b"".join(row for batch, valid in real for row in per_sample(batch, name)[:valid]))
        found.append(digest.hexdigest())
    states = [loader.state_dict() for loader in loaders]
    assert all(one == states[0] for one in states)
    return found, states[0]


def per_sample(batch: dict[str, Any], name: str) -> list[bytes]:
    """A batch's packs one by one: ranks hold different numbers of them."""
    if name == "tokens":
        return [row.numpy().tobytes() for row in batch["tokens"]]
    bounds = batch["cu_seqlens"].numpy()
    rows = [bounds[(bounds > at) & (bounds <= at + SEQ)] - at for at in range(0, bounds[-1], SEQ)]
    return [row.tobytes() for row in rows]


def test_a_packed_filtered_mixture_is_the_same_at_any_scale_and_after_resumes(root: Path) -> None:
    def make() -> Mixture:
        return three_packed(root)

    whole, end = digests(make, 1)
    assert len(whole) == len(set(whole)) > 20
    for world in (2, 4, 8):
        assert digests(make, world) == (whole, end)
    head, state = digests(make, 8, stop=5)
    middle, state = digests(make, 2, state, 7, num_workers=2, multiprocessing_context="fork")
    rest, state = digests(make, 4, state, num_workers=1, multiprocessing_context="fork", prefetch_factor=3)
    assert head + middle + rest == whole
    assert state == end
    assert len(json.dumps(state)) < 1024


def test_packs_hold_whole_documents_in_attention_boundaries(root: Path) -> None:
    dataset = text(root, out="int64")
    stream = np.concatenate([np.fromfile(root / "text" / f"part{n}.bin", "<u2") for n in range(2)])
    bounds = dataset.catalog.documents
    assert bounds is not None
    documents = {tuple(stream[a:b]): 0 for a, b in pairwise(bounds.tolist()) if a < b}
    loader = DataLoader(pack(dataset, SEQ), batch_size=8, shuffle=True, window=8192)
    tokens, ends = [], []
    for batch in loader:
        assert batch["tokens"].shape[1] == SEQ
        assert batch["tokens"].dtype == torch.int64
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"][[0, -1]].tolist() == [0, batch["tokens"].numel()]
        assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max()) <= SEQ
        ends += (batch["cu_seqlens"][1:] + len(tokens)).tolist()
        tokens += batch["tokens"].flatten().tolist()
    assert len(tokens) == len(stream) // SEQ * SEQ
    # pieces that end at a pack's end go on in the next pack: joined, they are the documents, each as often as stored
    begin, whole = 0, 0
    for end in ends:
        while tuple(tokens[begin:end]) in documents:
            documents[tuple(tokens[begin:end])] += 1
            begin = end
            whole += 1
    assert whole >= len(documents) - 1
    unshuffled = pack(dataset, SEQ)
    assert unshuffled[2]["tokens"].tolist() == stream[2 * SEQ : 3 * SEQ].tolist()
    assert len(unshuffled) == len(stream) // SEQ


def test_the_documents_of_raw_fields_and_of_records_are_packed_too(root: Path) -> None:
    cats = pack(notes(root).where("label == 'cat'"), 10, dtype="uint16")
    raw = b"".join(path.read_bytes() for path in sorted((root / "notes" / "cat").iterdir()))
    expected = sorted(np.frombuffer(raw, "<u2").tolist())
    seen = [n for batch in DataLoader(cats, batch_size=3) for n in batch["tokens"].flatten().tolist()]
    assert len(seen) == len(expected) // 10 * 10
    assert not set(seen) - set(expected)
    rows = np.load(root / "rows.npy")
    packed = pack(opened(root, "rows.npy", format="records"), 25)
    assert np.array_equal(np.concatenate([packed[i]["tokens"] for i in range(len(packed))]), rows.reshape(-1))
    assert packed[0]["cu_seqlens"].tolist() == [0, 10, 20, 25]


@pytest.mark.parametrize("chosen", [[17, 3, 40, 3, 0, 39], range(40, -1, -1)])
def test_unshuffled_packs_are_the_documents_in_the_sequence_of_select(
    root: Path, chosen: Sequence[int]
) -> None:
    """Also under a loader, at two ranks, and after a resume."""
    documents = notes(root).select(chosen)
    tokens = np.concatenate([np.frombuffer(documents[n][0], "<u2") for n in range(len(chosen))])
    packed = pack(documents, 25, dtype="uint16")
    wanted = tokens[: len(packed) * 25].reshape(-1, 25).tolist()
    assert [packed[n]["tokens"].tolist() for n in range(len(packed))] == wanted
    first = DataLoader(packed, batch_size=1)
    assert [next(iter(first))["tokens"][0].tolist()] == wanted[:1]
    halves = [DataLoader(packed, batch_size=1, global_batch_size=2, rank=r, world_size=2) for r in (0, 1)]
    one, other = ([batch["tokens"][0].tolist() for batch in half] for half in halves)
    assert [one[0], other[0]] == wanted[:2]
    then = DataLoader(packed, batch_size=1)
    then.load_state_dict(first.state_dict())
    assert [batch["tokens"][0].tolist() for batch in then] == wanted[1:]


def drawn(loader: DataLoader, epochs: int) -> list[tuple[int, int, int]]:
    """(component, own epoch, index) of every sample, checked against the sample itself."""
    mixture, found = loader.dataset, []
    for _ in range(epochs):
        for batch in loader:
            where = [column.tolist() for column in mixture.locate(loader.indices[: loader.valid])]
            values = batch[: loader.valid, 0].tolist()
            assert values == [1000 * c + i for c, i in zip(where[0], where[2], strict=True)]
            found += list(zip(*where, strict=True))
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_component_is_gone_through_exactly_once_in_each_of_its_epochs(root: Path, shuffle: bool) -> None:
    mixture = mix(dict(zip(numbers(root), (0.5, 0.2, 0.3), strict=True)))
    loaders = [
        DataLoader(mixture, batch_size=5, shuffle=shuffle, rank=r, world_size=2, last="drop", window=8192)
        for r in range(2)
    ]
    found = drawn(loaders[0], 1) + drawn(loaders[1], 1)
    assert len(found) == len(set(found)) == sum(SIZES) // 10 * 10
    alone = drawn(DataLoader(mixture, batch_size=10, shuffle=shuffle, window=8192), 4)
    assert len(alone) == len(set(alone)) == 4 * sum(SIZES)
    for component, size in enumerate(SIZES):
        passes = [own for c, own, _ in alone if c == component]
        for own in range(max(passes)):
            assert passes.count(own) == size
        assert abs(len(passes) - len(alone) * (0.5, 0.2, 0.3)[component]) <= 4
    if shuffle:
        first, second = ([i for c, own, i in alone if (c, own) == (2, n)] for n in (0, 1))
        assert first != second


@pytest.mark.parametrize(
    ("by", "weights", "size", "counts"),
    [
        ("repeat", (1, 1, 1), "total", (40, 25, 10)),
        ("repeat", (0.5, 1, 3), "total", (20, 25, 30)),
        ("choose", (7, 50, 1), "total", (7, 50, 1)),
        ("proportion", (2, 1, 1), 40, (20, 10, 10)),
        ("proportion", (2, 1, 1), "first", (21, 10, 10)),
        ("proportion", (2, 1, 1), "last", (49, 25, 24)),
        ("proportion", (0, 1, 1), 20, (0, 10, 10)),
    ],
)
def test_an_epoch_takes_from_each_what_was_asked(
    root: Path, by: Any, weights: tuple[float, ...], size: Any, counts: tuple[int, ...]
) -> None:
    mixture = mix(dict(zip(numbers(root), weights, strict=True)), by=by, size=size)
    found = drawn(DataLoader(mixture, batch_size=4, shuffle=True), 1)
    taken = tuple(sum(c == component for c, _, _ in found) for component in range(3))
    assert len(found) == len(mixture)
    assert all(
        abs(a - b) <= (by == "proportion" and isinstance(size, str))
        for a, b in zip(taken, counts, strict=True)
    )


def test_records_of_one_size_and_python_samples_are_the_same_batches(root: Path) -> None:
    mixture = mix(dict(zip(numbers(root), (1, 2, 3), strict=True)))
    fast = [batch.tolist() for batch in DataLoader(mixture, batch_size=7, shuffle=True)]
    slow = [
        torch.stack(batch).tolist()
        for batch in DataLoader(mixture, batch_size=7, shuffle=True, collate_fn=list)
    ]
    assert fast == slow
    shipped = pickle.loads(pickle.dumps(mixture))
    assert [batch.tolist() for batch in DataLoader(shipped, batch_size=7, shuffle=True)] == fast
    plain = torch.utils.data.DataLoader(mixture, batch_size=len(mixture))
    assert sorted(int(n) // 1000 for n in next(iter(plain))[:, 0]).count(2) == sum(
        c == 2 for c, _, _ in drawn(DataLoader(mixture, batch_size=7), 1)
    )


def augmented(sample: torch.Tensor, rng: np.random.Generator) -> tuple[int, float]:
    return int(sample[0]), float(rng.random())


def test_a_repeated_sample_is_augmented_anew_and_the_same_at_any_scale(root: Path) -> None:
    def seen(**more: Any) -> list[tuple[int, float]]:
        mixture = mix({numbers(root, transform=augmented)[2]: 3.0}, by="repeat")
        return [
            pair for batch in DataLoader(mixture, collate_fn=list, shuffle=True, **more) for pair in batch
        ]

    found = seen(batch_size=6)
    assert len(found) == 30
    assert len(set(found)) == 30
    assert seen(batch_size=3, num_workers=2, multiprocessing_context="fork") == found


def test_weights_change_at_the_beginning_of_an_epoch(root: Path) -> None:
    parts = numbers(root)
    mixture = mix(dict(zip(parts, (1, 1, 0), strict=True)), size=20)
    later = mixture.reweighed(dict(zip(parts, (0, 0, 1), strict=True)), epoch=1)
    first = DataLoader(mixture, batch_size=5, shuffle=True)
    before = drawn(first, 1)
    state = first.state_dict()
    second = DataLoader(later, batch_size=5, shuffle=True)
    second.load_state_dict(state)
    after = drawn(second, 1)
    assert {c for c, _, _ in after} == {2}
    assert before + after == drawn(DataLoader(later, batch_size=5, shuffle=True), 2)
    for _ in zip(second, range(2), strict=False):
        pass
    inside = second.state_dict()
    assert inside["dataset"].endswith("@0:1,1,0;1:0,0,1")
    with pytest.raises(StateMismatch, match="weights"):
        DataLoader(mixture, batch_size=5, shuffle=True).load_state_dict(inside)
    with pytest.raises(InvalidInput, match="epoch"):
        later.reweighed(dict(zip(parts, (1, 1, 1), strict=True)), epoch=1)


def test_the_length_of_several_epochs_counts_each_by_its_own_weights(root: Path) -> None:
    parts = numbers(root)
    mixture = mix(dict(zip(parts, (10, 10, 0), strict=True)), by="choose")
    for epoch, third in ((2, 10), (3, 0)):
        mixture = mixture.reweighed(dict(zip(parts, (5, 5, third), strict=True)), epoch)
    loader = DataLoader(mixture, batch_size=5, epochs=5)
    assert len(loader) == len(list(loader)) == 4 + 4 + 4 + 2 + 2
    assert len(loader) == 5 * 2  # epochs 5 to 9
    loader.set_epoch(1)
    loader.skip(5)  # to the second batch of epoch 2
    assert len(loader) == 4 + 4 * 2


def with_empty_epochs(root: Path) -> Mixture:
    """Four batches of 5 in epoch 0, less than one in those from 1 on, two in those from 10**12 on."""
    parts = numbers(root)
    mixture = mix(dict(zip(parts, (10, 10, 0), strict=True)), by="choose")
    for epoch, each in ((1, 1), (10**12, 5)):
        mixture = mixture.reweighed(dict(zip(parts, (each, each, 0), strict=True)), epoch)
    return mixture


def placed(loader: DataLoader, batches: int) -> list[tuple[int, list[int]]]:
    return [(loader.epoch, loader.indices.tolist()) for _ in islice(loader, batches)]


def test_an_endless_loader_goes_on_past_epochs_of_less_than_one_batch(root: Path) -> None:
    loader = DataLoader(with_empty_epochs(root), batch_size=5, shuffle=True, drop_last=True, epochs=None)
    straight = placed(loader, 9)
    later = 10**12
    assert [epoch for epoch, _ in straight] == [0] * 4 + [later] * 2 + [later + 1] * 2 + [later + 2]
    for consumed in range(9):
        first = DataLoader(with_empty_epochs(root), batch_size=5, shuffle=True, drop_last=True, epochs=None)
        placed(first, consumed)
        second = DataLoader(with_empty_epochs(root), batch_size=5, shuffle=True, drop_last=True, epochs=None)
        second.load_state_dict(first.state_dict())
        assert placed(second, 9 - consumed) == straight[consumed:]


def test_epochs_of_less_than_one_batch_are_epochs_without_batches(root: Path) -> None:
    loader = DataLoader(with_empty_epochs(root), batch_size=5, drop_last=True)
    assert [len(list(loader)) for _ in range(3)] == [4, 0, 0]
    assert loader.epoch == 3


def test_an_endless_loader_whose_later_epochs_are_all_less_than_one_batch_ends_with_an_error(
    root: Path,
) -> None:
    parts = numbers(root)[:2]
    mixture = mix(dict.fromkeys(parts, 10), by="choose").reweighed(dict.fromkeys(parts, 1), 1)
    loader = DataLoader(mixture, batch_size=5, drop_last=True, epochs=None)
    batches = iter(loader)
    assert len(list(islice(batches, 4))) == 4
    with pytest.raises(InvalidInput, match="less than one batch"):
        next(batches)
    loader.skip(7)
    assert loader.epoch == 1


@pytest.mark.parametrize("skipped", range(1, 9))
@pytest.mark.parametrize("consumed", [0, 3])
def test_a_skip_counts_no_batches_of_epochs_that_have_none(root: Path, consumed: int, skipped: int) -> None:
    def loader() -> DataLoader:
        return DataLoader(with_empty_epochs(root), batch_size=5, shuffle=True, drop_last=True, epochs=None)

    wanted = placed(loader(), 12)[consumed + skipped :]
    first = loader()
    batches = iter(first)
    assert len(list(islice(batches, consumed))) == consumed
    first.skip(skipped)
    state = first.state_dict()
    assert [(first.epoch, first.indices.tolist()) for _ in islice(batches, len(wanted))] == wanted
    second = loader()
    second.load_state_dict(state)
    assert placed(second, len(wanted)) == wanted


@pytest.mark.parametrize(("by", "one", "other"), [("choose", 10, 5), ("repeat", 1, 2)])
def test_a_state_knows_how_much_an_epoch_takes(root: Path, by: Any, one: int, other: int) -> None:
    parts = numbers(root)[:2]
    first = mix(dict.fromkeys(parts, 3), by=by)
    loader = DataLoader(first.reweighed(dict.fromkeys(parts, one), epoch=1), batch_size=5, shuffle=True)
    loader.set_epoch(1)
    next(iter(loader))
    changed = first.reweighed(dict.fromkeys(parts, other), epoch=1)
    with pytest.raises(StateMismatch, match="weights"):
        DataLoader(changed, batch_size=5, shuffle=True).load_state_dict(loader.state_dict())


def test_a_state_of_another_filter_mixture_or_packing_is_refused(root: Path) -> None:
    dataset = notes(root)
    parts = numbers(root)
    pairs: list[tuple[Any, Any]] = [
        (dataset.where("label == 'cat'"), dataset.where("label == 'dog'")),
        (dataset.take(40), dataset.select(range(40, 80))),
        (mix({parts[0]: 1, parts[1]: 1}, size=40), mix({parts[0]: 1, parts[1]: 2}, size=40)),
        (mix({parts[0]: 1, parts[1]: 1}, size=40), mix({parts[1]: 1, parts[0]: 1}, size=40)),
        (mix({parts[0]: 1}, size=40), parts[0]),
        (pack(text(root), 7), pack(text(root), 8)),
    ]
    for one, other in pairs:
        loader = DataLoader(one, batch_size=4, shuffle=True, collate_fn=list)
        next(iter(loader))
        state = loader.state_dict()
        same = pickle.loads(pickle.dumps(one))
        DataLoader(same, batch_size=4, shuffle=True, collate_fn=list).load_state_dict(state)
        with pytest.raises(StateMismatch, match="filter"):
            DataLoader(other, batch_size=4, shuffle=True, collate_fn=list).load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda root: mix({}), "nothing"),
        (lambda root: mix({numbers(root)[0]: -1.0, numbers(root)[1]: 1}), "weights"),
        (lambda root: mix({numbers(root)[0]: 0.0}), "weights"),
        (lambda root: mix({numbers(root)[0]: 1, numbers(root)[1].take(0): 1}), "empty"),
        (lambda root: mix({numbers(root)[0]: 1, opened(root, "rows.npy", format="records"): 1}), "differ"),
        (lambda root: mix({numbers(root)[0]: 1, notes(root): 1}), "differ"),
        (lambda root: mix({pack(text(root), 8): 1, pack(text(root), 9): 1}), "differ"),
        (lambda root: mix({numbers(root)[0]: 1}, by="taste"), "taste"),
        (lambda root: mix({numbers(root)[0]: 1}, size=0), "size"),
        (lambda root: mix({numbers(root)[0]: 1}, by="repeat", size="first"), "size"),
        (lambda root: mix({numbers(root)[0]: 1.5}, by="choose"), "whole samples.* 1.5"),
        (
            lambda root: mix(one := {numbers(root)[0]: 2.0}, by="choose").reweighed(
                dict.fromkeys(one, 0.5), 1
            ),
            "0.5",
        ),
        (lambda root: mix({mix({numbers(root)[0]: 1}): 1}), "Mixture"),
        (lambda root: pack(text(root), 10**6), "1000000"),
        (lambda root: pack(text(root), 0), "0"),
        (lambda root: pack(text(root).take(5), 8), "subset"),
        (lambda root: pack(notes(root), 8), "dtype"),
        (lambda root: pack(notes(root), 8, dtype="uint32"), "uint32"),
        (lambda root: pack(text(root, transform=len), 8), "transform"),
        (lambda root: notes(root).where("label == 'bird'"), "bird.* cat, dog"),
        (lambda root: notes(root).where("label == 'cat' and label == 'dog'"), "none"),
        (lambda root: mix({numbers(root)[0]: 1}).take(3), "datasets first, then mix"),
        (lambda root: mix({numbers(root)[0]: 1}).split({"train": 1.0}), "datasets first, then mix"),
        (lambda root: pack(text(root), 8).where("key == 'x'"), "datasets first, then pack"),
        (lambda root: pack(text(root), 8).select([1]), "datasets first, then pack"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_batch(
    root: Path, wrong: Callable[[Path], object], says: str
) -> None:
    with pytest.raises(CacheError, match=says) as caught:
        wrong(root)
    assert isinstance(caught.value, InvalidInput)
    assert "\n" not in str(caught.value)


def test_one_label_means_one_class_in_a_mixture(tmp_path: Path) -> None:
    def folders(name: str, *classes: str) -> Any:
        for one in classes:
            (tmp_path / name / one).mkdir(parents=True)
            (tmp_path / name / one / "0.txt").write_text(one)
        return open_dataset(tmp_path / name)

    pets, birds, more = folders("a", "cat", "dog"), folders("b", "bird", "cat"), folders("c", "cat", "dog")
    with pytest.raises(InvalidInput, match=r"2 classes \('cat', 'dog'; .* and .*\('bird', 'cat'; "):
        mix({pets: 1, birds: 1})
    pairs = next(iter(DataLoader(mix({pets: 1, more: 1}), batch_size=4, shuffle=True)))
    assert {pets.classes[label] for label in pairs[1].tolist()} == {"cat", "dog"}


def test_a_mismatch_of_long_mixtures_is_told_in_a_line_one_can_read(root: Path) -> None:
    parts = numbers(root)
    one = mix({parts[0]: 1, parts[1]: 1}, size=40)
    for epoch in range(1, 60):
        one = one.reweighed({parts[0]: epoch, parts[1]: 1 / 3}, epoch=epoch)
    loader = DataLoader(one, batch_size=4, shuffle=True)
    loader.set_epoch(80)
    state = loader.state_dict()
    other = DataLoader(one.reweighed({parts[0]: 7, parts[1]: 1}, epoch=70), batch_size=4, shuffle=True)
    with pytest.raises(StateMismatch, match=r"\.\.\..*70:.*; open that version") as caught:
        other.load_state_dict(state)
    assert len(str(caught.value)) < 800


def test_a_state_of_many_datasets_and_weights_is_small_and_knows_them(root: Path) -> None:
    (first, *_) = numbers(root)
    parts = [first.take(count) for count in range(1, 41)]

    def reweighed(tenth: int, epochs: int = 40) -> Mixture:
        mixture = mix(dict.fromkeys(parts, 1), size=40)
        for epoch in range(1, epochs):
            weights = [10_000_019 + epoch * part for part in range(40)]
            weights[0] += tenth * (epoch == 10)
            mixture = mixture.reweighed(dict(zip(parts, weights, strict=True)), epoch)
        return mixture

    loader = DataLoader(reweighed(1), batch_size=5, shuffle=True)
    loader.set_epoch(38)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(reweighed(1).identity) > 10_000
    assert len(json.dumps(state)) < 5_000
    following = [batch.tolist() for batch in batches]
    for same in (reweighed(1), reweighed(1, epochs=44)):
        resumed = DataLoader(same, batch_size=5, shuffle=True)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [batch.tolist() for batch in resumed] == following
    for other in (reweighed(0), reweighed(1, epochs=38)):
        with pytest.raises(StateMismatch, match="weights") as caught:
            DataLoader(other, batch_size=5, shuffle=True).load_state_dict(state)
        assert len(str(caught.value)) < 800


@dataclass
class PlannedLink:
    """Records the plans that a dataset's connection submits."""

    link: MemoryLink
    plans: list[Plan] = field(default_factory=list)
    grants: list[MemoryGrants] = field(default_factory=list)

    @property
    def id(self) -> Any:
        return self.link.id

    @property
    def daemon(self) -> str:
        return ""

    def catalog(self) -> Catalog:
        return self.link.catalog()

    def access(self, catalog: Catalog) -> Access:
        self.grants.append(MemoryGrants(catalog.extent))
        return Access(self.grants[-1], self.plans.append)


def test_each_connection_gets_one_plan_on_the_clock_of_the_mixture(root: Path) -> None:
    links = [
        PlannedLink(compiled(root / f"n{n}.npy", root, extent_bytes=4096, format="records")) for n in (0, 1)
    ]
    left, right = (Dataset(Opened(link), Form()) for link in links)  # type: ignore[arg-type]
    parts = left.split({"a": 0.5, "b": 0.5})
    mixture = mix({parts["a"]: 1, parts["b"]: 1, right: 2}, size="last")
    loader = DataLoader(mixture, batch_size=4, shuffle=True, window=8192)
    taken: list[tuple[int, int, int]] = []
    for step, _ in enumerate(loader):
        component, _, inner = mixture.locate(loader.indices[: loader.valid])
        views = [mixture.components[c] for c in component.tolist()]
        for view, index in zip(views, inner.tolist(), strict=True):
            sample = int(view.ids_of(np.asarray([index]))[0])
            extent = int(np.searchsorted(view.catalog.extent_first, sample, "right")) - 1
            taken.append((step, 0 if view.version == left.version else 1, extent))
    assert [len(link.plans) for link in links] == [1, 1]
    assert all(link.grants[0].steps[-1] >= step - 1 for link in links)
    for step, which, extent in taken:
        plan = links[which].plans[0]
        assert (np.diff(plan.first_step) >= 0).all()
        assert extent in plan.extent[(plan.first_step <= step) & (step <= plan.last_step)]


def test_packs_and_mixtures_say_what_they_are(root: Path) -> None:
    mixture = three_packed(root)
    assert "3 datasets" in repr(mixture)
    assert isinstance(mixture.components[0], Packed)
    assert "packs of 24" in repr(mixture.components[0])
    with pytest.raises(IndexError):
        mixture[len(mixture)]


def test_an_epoch_whose_draws_nobody_can_count_is_refused(root: Path) -> None:
    """And in the last one that can be, each draw follows the one before it."""
    parts = numbers(root)
    mixture = mix(dict(zip(parts, (0.5, 0.3, 0.2), strict=True)))

    def drawn(epoch: int) -> list[list[int]]:
        loader = DataLoader(mixture, batch_size=5, shuffle=True)
        loader.set_epoch(epoch)
        passes: list[list[int]] = [[], [], []]
        for _ in loader:
            for index, own_epoch, at in np.transpose(mixture.locate(loader.indices)).tolist():
                assert 0 <= at < SIZES[index]
                passes[index].append(own_epoch)
        return passes

    counted, refused = 0, 2**63 - 1
    while refused - counted > 1:
        middle = (counted + refused) // 2
        try:
            found, counted = drawn(middle), middle
        except InvalidInput:
            refused = middle
    with pytest.raises(InvalidInput, match="set a smaller epoch"):
        drawn(refused)
    assert counted > 2**55
    assert all(passes == sorted(passes) and passes[0] > 2**55 for passes in found)
