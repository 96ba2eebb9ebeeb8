"""Epochs under other projects' trainers: ledgers of every place where one can save, of epochs that are left early, and of
looks at a batch. A resumed run goes on with the samples of the uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import DataLoader, open_dataset
from tests.compat.launch import numbered, ran, torchrun
from tests.compat.ledger import ids

for name in ("accelerate", "pytorch_lightning", "transformers"):
    pytest.importorskip(name, reason=f"no {name} here: `make compat` installs it")

import pytorch_lightning as lightning  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from lightning_fabric import Fabric  # noqa: E402

COUNT, BATCH, EPOCHS = 24, 4, 3
STEPS = COUNT // BATCH
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Record n holds n."""
    return str(numbered(tmp_path_factory.mktemp("epochs") / "rows.npy", COUNT))


def loader(rows: str, **given: Any) -> DataLoader[Any]:
    return DataLoader(open_dataset(rows), BATCH, **{"shuffle": True} | given)


def epochs_of(rows: str) -> list[list[list[int]]]:
    """The batches of each epoch of a plain loop."""
    run = loader(rows)
    return [[ids(batch) for batch in run] for _ in range(EPOCHS)]


class Model(lightning.LightningModule):
    """Model that records the samples of its steps and of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.steps: list[list[int]] = []
        self.validations: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.steps.append(ids(batch))
        return self.layer(batch.float()).sum()

    def on_validation_epoch_start(self) -> None:
        self.validations.append([])

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.validations[-1] += ids(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class SaveEverywhere(lightning.Callback):
    """Callback that saves a checkpoint wherever ModelCheckpoint can."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: Any, model: Any, place: str) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{len(model.steps):02d}-{place}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.save(trainer, pl_module, "batch")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "epoch")


def fit(rows: str, saves: Path | None, start: Path | None = None, **given: Any) -> Model:
    model = Model()
    run = lightning.Trainer(
        **QUIET,
        accelerator="cpu",
        max_epochs=EPOCHS,
        enable_checkpointing=False,
        callbacks=[SaveEverywhere(saves)] if saves is not None else [],
        **given,
    )
    run.fit(
        model, loader(rows), loader(rows, shuffle=False), ckpt_path=start and str(start), weights_only=False
    )
    return model


@pytest.mark.parametrize(
    "given",
    [
        {"val_check_interval": 0.5, "num_sanity_val_steps": 2},
        {"limit_train_batches": 4, "val_check_interval": 2, "limit_val_batches": 2},
        {"val_check_interval": 1.0, "accumulate_grad_batches": 2},
    ],
)
def test_lightning_resumes_from_every_place_where_it_saves(
    rows: str, tmp_path: Path, given: dict[str, Any]
) -> None:
    whole, limit = fit(rows, tmp_path, **given), given.get("limit_train_batches", STEPS)
    assert whole.steps == [batch for epoch in epochs_of(rows) for batch in epoch[:limit]]
    validation = list(range(COUNT))[: BATCH * given.get("limit_val_batches", STEPS)]
    for start in sorted(tmp_path.iterdir()):
        rest = fit(rows, None, start, **given)
        assert rest.steps == whole.steps[int(start.name[:2]) :], start.name
        assert all(each in (validation, validation[: 2 * BATCH]) for each in rest.validations)


def test_lightning_after_a_look_and_in_a_second_fit(rows: str, tmp_path: Path) -> None:
    """A notebook looks at a loader, trains on it, and trains on it again."""
    run, model, wanted = loader(rows), Model(), epochs_of(rows)
    next(iter(run))

    def trained(epochs: int, start: Path | None) -> list[list[int]]:
        model.steps = []
        trainer = lightning.Trainer(
            **QUIET, accelerator="cpu", max_epochs=epochs, limit_train_batches=4, enable_checkpointing=False
        )
        trainer.fit(model, run, ckpt_path=start and str(start), weights_only=False)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return model.steps

    assert trained(2, None) == wanted[0][:4] + wanted[1][:4]
    assert trained(3, tmp_path / "last.ckpt") == wanted[2][:4]


@pytest.mark.parametrize("taken", range(0, 2 * STEPS + 1))
def test_fabric_resumes_from_every_place(rows: str, tmp_path: Path, taken: int) -> None:
    def batches_of(own: DataLoader[Any]) -> Any:
        return fabric.setup_dataloaders(own)

    fabric, wanted, seen = Fabric(accelerator="cpu"), epochs_of(rows), list[list[int]]()
    own, path = loader(rows), tmp_path / "fabric.ckpt"
    begun = batches_of(own)
    if not taken:
        fabric.save(path, {"loader": begun})
    for _ in range(EPOCHS):
        for batch in begun:
            seen.append(ids(batch))
            if len(seen) == taken:
                fabric.save(path, {"loader": begun})
    assert seen == [*chain(*wanted)]
    for again in (loader(rows), own):  # in another process, and in this one, where the loader is set up anew
        rest = batches_of(again)
        fabric.load(path, {"loader": rest})
        assert [ids(batch) for _ in range(again.epoch, EPOCHS) for batch in rest] == seen[taken:]


def test_fabric_begins_the_next_epoch_after_one_that_was_left(rows: str) -> None:
    wanted = epochs_of(rows)
    run: Any = Fabric(accelerator="cpu").setup_dataloaders(loader(rows))
    assert [[ids(batch) for batch in islice(run, 2)] for _ in range(EPOCHS)] == [
        epoch[:2] for epoch in wanted
    ]


def ahead(batches: Any) -> Iterator[Any]:
    """Gives each batch once the next one is there, so that Accelerate knows the last one."""
    taken = [*islice(reading := iter(batches), 1)]
    for following in reading:
        yield taken.pop()
        taken.append(following)
    yield from taken


@pytest.mark.parametrize("steps", [2, STEPS - 1, STEPS])
def test_epochs_that_are_left_under_accelerate_are_followed_by_the_next(rows: str, steps: int) -> None:
    wanted, (run, other) = epochs_of(rows), Accelerator(cpu=True).prepare(loader(rows), loader(rows))
    for batches in (lambda: run, lambda: ahead(other)):
        seen = [[ids(batch) for batch in islice(batches(), steps)] for _ in range(EPOCHS)]
        assert seen == [epoch[:steps] for epoch in wanted]


@pytest.mark.parametrize("taken", [0, 1, STEPS - 1, STEPS, STEPS + 2])
def test_accelerate_resumes_from_every_place(rows: str, tmp_path: Path, taken: int) -> None:
    accelerator = Accelerator(cpu=True)
    run, seen = accelerator.prepare(loader(rows)), list[list[int]]()
    while len(seen) < taken:
        seen += [ids(batch) for batch in islice(run, taken - len(seen))]
    accelerator.save_state(str(tmp_path))
    resumed = Accelerator(cpu=True)
    rest = resumed.prepare(loader(rows))
    resumed.load_state(str(tmp_path))
    seen += [ids(batch) for _ in range(rest.epoch, EPOCHS) for batch in rest]
    assert seen == [*chain(*epochs_of(rows))]


def job(rows: str, out: Path, way: str, workers: int, ranks: int) -> list[list[list[list[float]]]]:
    """Run `trainer_epochs` on some ranks; return what each saw in each step."""
    ran(*torchrun(ranks), "-m", "tests.compat.runs.trainer_epochs", rows, str(out), way, f"{workers}")
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_trainer_with_max_steps_goes_on_to_the_next_epoch_on_two_ranks(rows: str, tmp_path: Path) -> None:
    """`max_steps` of two epochs and a step; rank 0 has looked at a batch by `peek`."""
    steps = [
        sorted(int(n) for n, _ in one + other)
        for one, other in zip(*job(rows, tmp_path, "override", 0, 2), strict=True)
    ]
    plain = DataLoader(open_dataset(rows), 2 * BATCH, shuffle=True, epochs=EPOCHS)
    assert steps == [sorted(ids(batch)) for batch in islice(plain, 2 * STEPS // 2 + 1)]


@pytest.mark.parametrize(("workers", "ranks"), [(0, 2), (1, 1)])
def test_transforms_draw_anew_in_each_epoch_of_trainers_own_loader(
    rows: str, tmp_path: Path, workers: int, ranks: int
) -> None:
    """Trainer calls no `set_epoch` of the dataset on two ranks, and persistent workers do not hear of it on one."""
    seen: dict[int, list[float]] = {}
    for rank in job(rows, tmp_path, "train_dataset", workers, ranks):
        for number, drawn in chain(*rank):
            seen.setdefault(int(number), []).append(drawn)
    assert sorted(seen) == list(range(COUNT))
    assert all(len(set(drawn)) == len(drawn) >= 2 for drawn in seen.values())
