"""Documents that a run leaves out are in no pack from there on, and all others are where they were, at any scale and after
any resume; and the saved state says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cachesvc.core.errors import InvalidInput
from cachesvc.saved_runs.contents import Contents
from cachesvc.saved_runs.open import opened_run
from loader import DataLoader, Dataset, mix, open_dataset, pack
from testbed.node import Daemon
from tests.support.datasets import array_file, megatron, write_files
from tests.support.training.loader_fakes import in_step

SEQ, BATCH, LONG = 32, 8, 70
EOS = 60_000
"""Document n has the tokens n + 1, and ends with EOS in token files without an index."""
FORM: dict[str, Any] = {"format": "tokens", "extent_bytes": 4096}


class Case(NamedTuple):
    """Packs of a dataset; `key` names its documents, whose numbers are `numbers` in the sequence of the dataset."""

    data: Dataset
    form: dict[str, Any]
    key: str
    numbers: torch.Tensor = torch.arange(120)

    def packed(self, fit: Any, **more: Any) -> Any:
        return pack(self.data, SEQ, fit=fit, document_ids=True, **self.form | more)


def repeated(line: str) -> list[int]:
    number, length = map(int, line.split())
    return [number + 1] * length


def case(kind: str, root: Path) -> Case:
    """120 documents in two files. Document 70 is longer than four packs."""
    lengths = np.random.default_rng(3).integers(1, 60, 120).tolist()
    lengths[LONG] = 5 * SEQ
    runs = [[n + 1] * length for n, length in enumerate(lengths)]
    if kind == "index":
        for name, part in (("a", runs[:80]), ("b", runs[80:])):
            megatron(root / "index" / name, part)
        return Case(open_dataset(root / "index", seq_len=1, **FORM), {}, "{0}.bin#{1}")
    if kind == "eos":
        for name, part in (("a", runs[:80]), ("b", runs[80:])):
            ends = [each for one in part for each in [*one[1:], EOS]]
            array_file(root / "eos" / f"{name}.bin", np.array(ends, "<u2"))
        data = open_dataset(root / "eos", dtype="uint16", seq_len=8, **FORM)
        form = {"eos": EOS, "counts": root / "counts-eos"}
        return Case(data, form, "{0}.bin#{1}")
    if kind == "rows":
        lines = (f"{n} {length}\n" for n, length in enumerate(lengths))
        write_files(root / "rows", {"a.txt": "".join(lines).encode()})
        data = open_dataset(root / "rows", format="text", extent_bytes=4096)
        return Case(data, {"tokenize": repeated, "counts": root / "counts-rows"}, "a.txt:{2}")
    stored = {f"{n:03d}.tok": np.array(each, "<u2").tobytes() for n, each in enumerate(runs)}
    write_files(root / "files", stored)
    data = open_dataset(root / "files", fields=("tok",), decode=None, extent_bytes=4096)
    numbers = torch.tensor([int(data.catalog.key(index)[:3]) for index in range(len(data))])
    return Case(data, {"dtype": "uint16"}, "{2:03d}.tok", numbers)


def key_of(found: Case, n: int) -> str:
    return found.key.format("ab"[n >= 80], n % 80, n)


def tokens_of(found: Case, step: list[Any]) -> Counter[int]:
    """The real tokens of a step by document, from the batches themselves."""
    tokens_by: Counter[int] = Counter()
    for batch, valid in step:
        tokens, owners = batch["tokens"][:valid].long(), batch["document_ids"][:valid]
        assert not tokens[owners < 0].any(), "the rest is padding"
        tokens, numbers = tokens[owners >= 0], found.numbers[owners[owners >= 0]]
        assert torch.equal(tokens == numbers + 1, tokens != EOS)
        tokens_by.update(numbers[tokens != EOS].tolist())
    return tokens_by


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("node")
    with Daemon(root, ["--ram", "8MiB", "--extent-bytes", "4KiB"]) as started:
        yield started


@pytest.fixture
def via(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Have datasets opened by a daemon, or read directly."""

    def chosen(how: str) -> None:
        socket = request.getfixturevalue("daemon").socket_dir if how == "daemon" else str(folder / "none")
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("CACHESVC", "require" if how == "daemon" else "off")
        monkeypatch.setenv("CACHESVC_SOCKET", socket)

    return chosen


GRID = [
    *product(("direct", "daemon"), ("index", "eos", "rows", "fields"), ("wrap", "best"), (1, 2, 4), (0, 2))
]
QUICK = [
    ("direct", "index", "wrap", 2, 0),
    ("daemon", "eos", "best", 4, 0),
    ("direct", "fields", "best", 1, 0),
]


@pytest.mark.parametrize(
    ("how", "kind", "fit", "world", "workers"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in GRID if each not in QUICK)],
)
def test_documents_are_gone_from_where_they_were_excluded_and_all_others_stay(
    folder: Path, via: Callable[[str], None], how: str, kind: str, fit: str, world: int, workers: int
) -> None:
    via(how)
    found = case(kind, folder)
    assert found.data.via == {"direct": "direct reads", "daemon": "daemon"}[how]

    def ranks(number: int, **more: Any) -> list[DataLoader]:
        forked = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        given = {"shuffle": True, "seed": 2, "window": 8192, "epochs": 2, "last": "pad"} | forked
        given["global_batch_size"] = BATCH
        packs = found.packed(fit)
        return [
            DataLoader(packs, BATCH // number, rank=rank, world_size=number, **given | more)  # type: ignore[arg-type]
            for rank in range(number)
        ]

    plain = [tokens_of(found, step) for step in in_step(ranks(1))[0]]
    short, late = 7, 100
    index = found.numbers.tolist().index
    stop = len(plain) // 4
    head, state = in_step(ranks(world, exclude=[key_of(found, short)]), stop=stop)
    assert state["excluded"] == f"0:{index(short)}"
    more = [key_of(found, n) for n in (late, LONG, short)]
    middle, state = in_step(ranks(4 // world, exclude=more), state, stop=len(plain) // 2)
    assert state["excluded"] == (
        f"0:{index(short)};{stop}:" + ",".join(map(str, sorted(map(index, (LONG, late)))))
    )
    (one,) = ranks(1)
    end, state = in_step([one], state)
    steps = [tokens_of(found, step) for step in head + middle + end]
    assert len(steps) == len(plain), "no count has changed"
    for step, (before, now) in enumerate(zip(plain, steps, strict=True)):
        gone = {short} if step < stop else {short, LONG, late}
        assert now == Counter({n: count for n, count in before.items() if n not in gone})
    assert {len(batch["tokens"]) for step in end for batch, _ in step} == {BATCH}, "equal shapes"
    if fit == "wrap":
        assert min(valid for step in end for _, valid in step) < BATCH, "nothing was left of some packs"

    counts = str(folder / f"counts-{kind}")
    saved = opened_run(one.state_dict(), counts=counts)
    for step, tokens in enumerate(steps):
        named, told = one.samples_of(step), saved.named(saved.samples_of(step))
        assert [each[1:] for each in told] == [(each.places, each.documents) for each in named]
        keys = {key for each in named for key in each.documents}
        assert keys >= {key_of(found, n) for n in tokens}
        assert kind == "eos" or len(keys) == len(tokens), "documents of eos alone have no other token"
    for n in (short, LONG, late):
        having = {each.step for each in saved.steps_with(key_of(found, n))}
        assert having == {step for step, tokens in enumerate(steps) if n in tokens}
    first, rest = ranks(1, exclude=[key_of(found, short)]), ranks(1, exclude=more)
    in_step(first, stop=stop)
    assert first[0].digest() == saved.digest_of(range(stop), Contents(None, True).of)
    in_step(rest, first[0].state_dict())
    assert rest[0].digest() == saved.digest_of(range(len(steps)), Contents(None, True).of)


def test_a_step_that_has_begun_keeps_its_documents(folder: Path, via: Callable[[str], None]) -> None:
    """They are left out from the next step on, and the digest of the run says so."""
    via("direct")
    found = case("fields", folder)
    given: dict[str, Any] = {"global_batch_size": BATCH, "shuffle": True}
    plain = in_step([DataLoader(found.packed("wrap"), 2, **given)])[0]
    keys = [key_of(found, n) for step in plain[2:6] for n in tokens_of(found, step)]
    first, second = (DataLoader(found.packed("wrap"), 2, **given, exclude=each) for each in ([], keys))
    head, state = in_step([first], stop=2)
    first.digest()
    rest, _ = in_step([second], first.state_dict())
    assert (state["micro"], second.state_dict()["excluded"][:2]) == (2, "1:")
    whole = [tokens_of(found, step) for step in plain]
    now = [tokens_of(found, step) for step in head + rest]
    assert now[:4] == whole[:4]
    assert sum(now[4:6], Counter()) != sum(whole[4:6], Counter())
    run = opened_run(second.state_dict())
    assert run.digest_of(range(len(plain) // 4), Contents(None, True).of) == second.digest()


def test_a_mixture_leaves_out_documents_and_samples_of_its_components(
    folder: Path, via: Callable[[str], None]
) -> None:
    via("direct")
    parts = [case(kind, folder) for kind in ("index", "fields")]

    def counted(exclude: list[str]) -> tuple[Counter[tuple[int, int]], DataLoader]:
        mixed = mix({part.packed(fit): 1 for part, fit in zip(parts, ("wrap", "best"), strict=True)})
        loader, tokens_by = (
            DataLoader(mixed, BATCH, shuffle=True, exclude=exclude),
            Counter[tuple[int, int]](),
        )
        for batch in loader:
            components = mixed.locate(loader.indices)[0]
            for row in range(loader.valid):
                alone = {name: batch[name][row : row + 1] for name in ("tokens", "document_ids")}
                found = tokens_of(parts[components[row]], [(alone, 1)])
                tokens_by.update({(int(components[row]), n): count for n, count in found.items()})
        return tokens_by, loader

    plain, _ = counted([])
    left, loader = counted(["a.bin#7", "100.tok"])
    assert plain[0, 7] > 0 < plain[1, 100]
    assert left == Counter({n: count for n, count in plain.items() if n not in ((0, 7), (1, 100))})
    run = opened_run(loader.state_dict())
    assert run.digest_of(range(len(loader)), Contents(None, True).of) == loader.digest()


def test_keys_that_name_no_document_are_refused(folder: Path, via: Callable[[str], None]) -> None:
    via("direct")
    found = case("index", folder)
    packs = found.packed("wrap")
    with pytest.raises(InvalidInput, match=r"'a.bin:3' is a run of tokens .* as in 'a.bin#0'"):
        DataLoader(packs, exclude=["a.bin:3"])
    for wrong in ("a.bin#80", "c.bin#0", "a.bin#-1", "#3", ""):
        with pytest.raises(InvalidInput, match="no sample has the key"):
            DataLoader(packs, exclude=[wrong])
    assert DataLoader(packs, exclude=["b.bin#39", "b.bin#0"]).excluded == (80, 119)
    unsigned = pack(found.data, SEQ, targets="shifted", edges="join")
    loader = DataLoader(unsigned, 4, exclude=["a.bin#0"])
    assert next(iter(loader))["targets"].dtype == torch.int64
