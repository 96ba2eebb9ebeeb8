"""Packs at the edges of documents: targets, positions and boundaries, exact at any scale and after resumes."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.state import SINCE_VERSION_5
from loader import DataLoader, Packed, mix, open_dataset, pack
from testbed.node import Daemon
from tests.support.datasets import megatron
from tests.support.training.loader_fakes import in_step
from tests.support.training.mixtures import dataset_in

SEQ, GLOBAL = 24, 8
FORMS: dict[str, dict[str, Any]] = {
    "wrap, shifted": {"targets": "shifted"},
    "wrap, unshifted": {"targets": "unshifted"},
    "best, shifted": {"targets": "shifted", "fit": "best"},
    "best, unshifted": {"targets": "unshifted", "fit": "best"},
}


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Documents in two files whose tokens are numbered through from 1, and where each document begins in them: some are
    longer than several packs, some are single tokens."""
    root, draw = tmp_path_factory.mktemp("documents"), np.random.default_rng(2)
    lengths = [*draw.integers(1, 40, 150).tolist(), 1, 1, 100, 24, 25, 48, 1]
    starts = np.cumsum([1, *lengths])
    numbers = [list(range(low, high)) for low, high in pairwise(starts.tolist())]
    megatron(root / "text" / "a", numbers[:80], "<i4")
    megatron(root / "text" / "b", numbers[80:], "<i4")
    return root, starts


def packed(root: Path, **form: Any) -> Packed:
    return pack(dataset_in(root, "text", format="tokens", seq_len=1), SEQ, document_ids=True, **form)


def document_of(starts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The document of each token; -1 for padding, which is 0."""
    return np.where(tokens == 0, -1, np.searchsorted(starts, tokens, "right") - 1)


def checked(batch: dict[str, Any], starts: np.ndarray, targets: str) -> np.ndarray:
    """Check a batch against the numbers of its tokens, one by one; return its inputs."""
    names = ("inputs", "targets") if targets == "shifted" else ("input_ids", "labels")
    inputs, labels = (batch[name].numpy() for name in names)
    documents = document_of(starts, inputs)
    assert np.array_equal(batch["document_ids"].numpy(), documents)
    edges = [0]
    for row in range(len(inputs)):
        position = 0
        for place, token in enumerate(inputs[row].tolist()):
            new = place == 0 or documents[row, place] != documents[row, place - 1]
            position = 0 if new else position + 1
            edges += [row * SEQ + place] if new and row + place else []
            assert batch["position_ids"][row, place] == position
            if targets == "unshifted":
                wanted = -100 if new or not token else token
            else:
                ends = token + 1 in starts or not token
                wanted = -100 if ends else token + 1
            assert labels[row, place] == wanted
    assert batch["cu_seqlens"].tolist() == [*edges, inputs.size]
    assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max())
    assert batch["cu_seqlens"].dtype == torch.int32
    return inputs


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_target_is_the_next_token_of_its_document(
    bounds: tuple[Path, np.ndarray], name: str, workers: int
) -> None:
    root, starts = bounds
    form = FORMS[name]
    packs = packed(root, **form)
    seen: Counter[int] = Counter()
    loader = DataLoader(packs, 4, shuffle=True, window=8192, num_workers=workers, worker_type="thread")
    for batch in loader:
        inputs = checked(batch, starts, form["targets"])
        seen.update(inputs[: loader.valid].reshape(-1).tolist())
    seen.pop(0, None)
    assert set(seen.values()) == {1}
    if form["targets"] == "unshifted":  # shifted, the last token of a full pack is a target alone
        assert sum(seen.values()) == int(starts[-1]) - 1 - packs.dropped_tokens
    custom = next(iter(DataLoader(packs, 3, shuffle=True, window=8192, collate_fn=list)))
    collated = packs.collate(custom)
    first = next(iter(DataLoader(packs, 3, shuffle=True, window=8192)))
    assert collated.keys() == first.keys()
    for key, value in first.items():
        assert value == collated[key] if key == "max_seqlen" else torch.equal(value, collated[key])


def taken(
    root: Path, form: dict[str, Any], world: int, workers: int, state: object = None, stop: int = 10**9
) -> tuple[list[list[Any]], Any]:
    """Return the packs of each global batch, and the state after them."""
    more: dict[str, Any] = {"multiprocessing_context": "fork", "num_workers": workers} if workers else {}
    given: dict[str, Any] = {"shuffle": True, "window": 8192, "seed": 5, "last": "drop", "epochs": 2} | more
    loaders = [
        DataLoader(packed(root, **form), GLOBAL // world, rank=rank, world_size=world, **given)
        for rank in range(world)
    ]
    steps, after = in_step(loaders, state, stop)
    names = ["inputs", "targets"] if form["targets"] == "shifted" else ["input_ids", "labels"]
    names += ["position_ids", "document_ids"]
    rows = [
        [
            [batch[name][row].tolist() for name in names]
            for batch, _ in step
            for row in range(len(batch[names[0]]))
        ]
        for step in steps
    ]
    return rows, after


@pytest.mark.parametrize(
    "name",
    [
        "wrap, shifted",
        "best, unshifted",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("wrap, unshifted", "best, shifted")),
    ],
)
def test_a_ledger_of_packs_is_the_same_at_any_scale_and_after_resumes(
    bounds: tuple[Path, np.ndarray], name: str
) -> None:
    root, form = bounds[0], FORMS[name]
    whole, end = taken(root, form, 1, 0)
    assert len(whole) == 2 * (len(packed(root, **form)) // GLOBAL)
    for world, workers in ((2, 2), (4, 0)):
        head, state = taken(root, form, 1, workers, stop=3)
        middle, state = taken(root, form, world, workers, state, len(whole) - 7)
        rest, state = taken(root, form, 4 // world, 2 - workers, state)
        assert head + middle + rest == whole
        assert state | {"digest": ""} == end | {"digest": ""}
    for epoch in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        numbers = Counter(token for step in epoch for row in step for token in row[0] if token)
        assert set(numbers.values()) == {1}


def test_packs_through_a_daemon_are_those_of_direct_reads(
    bounds: tuple[Path, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, starts = bounds

    def opened() -> Any:
        return open_dataset(root / "text", format="tokens", seq_len=1, extent_bytes=4096)

    given: dict[str, Any] = {"shuffle": True, "window": 8192, "epochs": None}
    forms = [form | {"document_ids": True} for form in FORMS.values()]
    wanted = [next(iter(DataLoader(pack(opened(), SEQ, **form), 16, **given))) for form in forms]
    options = ["--ram", "8MiB", "--extent-bytes", "4096", "--fillers", "1"]
    with Daemon(tmp_path / "node", options) as daemon:
        monkeypatch.setenv("CACHESVC", "require")
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        for form, direct in zip(forms, wanted, strict=True):
            data = opened()
            assert data.via == "daemon"
            batch = next(iter(DataLoader(pack(data, SEQ, **form), 16, num_workers=1, **given)))
            checked(batch, starts, form["targets"])
            assert all(torch.equal(batch[key], direct[key]) for key in direct if key != "max_seqlen")


def test_a_real_end_of_document_token_stays_a_target(tmp_path: Path) -> None:
    """Token 7 ends each document, and occurs inside one."""
    megatron(tmp_path / "t" / "d", [[1, 2, 7], [3, 7, 4, 7], [5, 7]])
    documents = dataset_in(tmp_path, "t", format="tokens", seq_len=1)
    shifted = pack(documents, 8, targets="shifted")[0]
    assert shifted["targets"].tolist() == [2, 7, -100, 7, 4, 7, -100, 7]
    assert shifted["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert shifted["cu_seqlens"].tolist() == [0, 3, 7, 8]
    assert pack(documents, 9, targets="unshifted")[0]["labels"].tolist() == [
        -100,
        2,
        7,
        -100,
        7,
        4,
        7,
        -100,
        7,
    ]
    joined = pack(documents, 8, targets="shifted", edges="join")[0]
    assert joined["targets"].tolist() == [2, 7, 3, 7, 4, 7, 5, 7]
    assert "position_ids" not in joined


def test_document_ids_are_indices_of_the_dataset(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(40).reshape(10, 4))
    rows = dataset_in(tmp_path, "rows.npy", format="records")
    for chosen in (rows, rows.select([7, 2, 9, 0])):
        for shuffle in (False, True):
            loader = DataLoader(pack(chosen, 6, document_ids=True), 2, shuffle=shuffle)
            for batch in loader:
                indices = batch["document_ids"].reshape(-1).tolist()
                stored = [int(chosen[index][0]) // 4 for index in indices]
                assert stored == (batch["tokens"] // 4).reshape(-1).tolist()
    best = pack(rows.select([7, 2, 9, 0]), 9, document_ids=True, fit="best")
    assert [best[at]["document_ids"].tolist() for at in (0, 1)] == [
        [3] * 4 + [1] * 4 + [-1],
        [0] * 4 + [2] * 4 + [-1],
    ]


def test_a_state_of_before_edges_joins_and_says_so_once(bounds: tuple[Path, np.ndarray]) -> None:
    root = bounds[0]

    def loader(mixed: bool = False, **form: Any) -> DataLoader:
        packs = packed(root, targets="shifted", **form)
        return DataLoader(mix({packs: 1.0}) if mixed else packs, 4, shuffle=True, seed=2)

    def joins(batches: DataLoader) -> bool:
        return not any((batch["targets"] == -100).any() for batch in batches)

    for mixed in (False, True):
        first = loader(mixed)
        next(iter(first))
        state = json.loads(json.dumps(first.state_dict()))
        old = {name: value for name, value in state.items() if name not in SINCE_VERSION_5} | {"version": 4}
        then = loader(mixed)
        with pytest.warns(UserWarning, match="edges='join'") as told:
            then.load_state_dict(old)
        assert [each.filename for each in told] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (then.peek()["targets"] == -100).sum() == 0
            after = then.state_dict()
            assert after["edges"] == "join"
            assert joins(then)
            again = loader(mixed)
            again.load_state_dict(after)
            assert joins(again)
            for edges in ("mask", "join"):
                asked = loader(mixed, edges=edges)
                asked.load_state_dict(old)
                assert joins(asked) == (edges == "join")
            fresh = loader(mixed)
            fresh.load_state_dict(state)
            assert not joins(fresh)
    with pytest.raises(StateMismatch, match="edges are 'maybe'"):
        loader(mixed=True).load_state_dict(state | {"edges": "maybe"})


def test_packs_of_whole_documents_count_what_they_drop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megatron(tmp_path / "t" / "d", [[1] * 7, [2] * 3, [3] * 25, [4] * 10])
    documents = dataset_in(tmp_path, "t", format="tokens", seq_len=1)
    caplog.set_level("INFO", "cachesvc")
    cut = pack(documents, 10, fit="best")
    assert (len(cut), cut.dropped_tokens, cut.real_share) == (5, 0, 0.9)
    assert "5 packs of 10 tokens, 90.0 % of them real; 0 tokens are dropped" in caplog.text
    rows = [cut[at]["tokens"].tolist() for at in range(5)]
    assert rows == [[1] * 7 + [2] * 3, [3] * 10, [3] * 10, [3] * 5 + [0] * 5, [4] * 10]
    caplog.clear()
    short = pack(documents, 10, fit="best", overflow="truncate")
    assert (len(short), short.dropped_tokens, short.real_share) == (3, 15, 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(
        InvalidInput, match=r"1 of 4 documents are longer than 10 tokens, up to 25: give overflow="
    ):
        pack(documents, 10, fit="best", overflow="error")
    assert len(pack(documents, 25, fit="best", overflow="error")) == 2
    wrapped = pack(documents, 10)
    assert (wrapped.dropped_tokens, wrapped.real_share) == (5, 1.0)
    state = DataLoader(cut).state_dict()
    for other in (short, wrapped):
        with pytest.raises(StateMismatch, match="version"):
            DataLoader(other).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"edges": "cut"}, "edges='cut': give one of 'mask', 'join'"),
        ({"layout": "jax"}, "layout='jax': give one of 'torchtitan', 'transformers', 'olmo'"),
        ({"layout": "olmo", "targets": "shifted"}, "layout='olmo' has unshifted targets, not shifted"),
        ({"fit": "worst"}, "fit='worst': give one of 'wrap', 'best'"),
        ({"fit": "best", "overflow": "spill"}, "overflow='spill': give one of 'split', 'truncate', 'error'"),
        ({"overflow": "truncate"}, "overflow='truncate' is for fit='best'"),
        ({"document_ids": "all"}, "document_ids='all'"),
        ({"fit": "best", "seq_len": 0}, "seq_len=0"),
    ],
)
def test_wrong_arguments_are_refused(
    bounds: tuple[Path, np.ndarray], given: dict[str, Any], says: str
) -> None:
    documents = dataset_in(bounds[0], "text", format="tokens", seq_len=1)
    with pytest.raises(InvalidInput, match=says):
        pack(documents, **({"seq_len": SEQ} | given))


def test_a_type_that_cannot_hold_the_mark_is_refused(bounds: tuple[Path, np.ndarray]) -> None:
    unsigned = dataset_in(bounds[0], "text", {"out": "uint16"}, format="tokens", seq_len=1)
    with pytest.raises(InvalidInput, match="out='uint16' cannot hold -100"):
        pack(unsigned, SEQ, targets="shifted")
    assert pack(unsigned, SEQ, targets="shifted", edges="join")[0]["targets"].dtype == torch.uint16
    assert pack(unsigned, SEQ)[0]["tokens"].dtype == torch.uint16
