"""A training script under Ray Train: `python -m tests.compat.runs.ray_job RANKS PHASE ROWS FOLDER`; see `ledger_job`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

from loader import open_dataset
from tests.compat.ledger import EPOCHS, STOP, Model, ids, loader_of, save

PASSED_ON = ("PYTHONPATH", "CACHESVC", "GLOO_SOCKET_IFNAME", "XDG_CACHE_HOME")


def train(given: dict[str, Any]) -> None:
    """One rank: train until the end, or report a checkpoint after `stop` steps and end."""
    context = get_context()
    os.environ["WORLD_SIZE"] = str(context.get_world_size())
    batches: Any = prepare_data_loader(loader_of(open_dataset(given["rows"])), move_to_device=False)
    model = prepare_model(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if given["checkpoint"]:
        state = torch.load(Path(given["checkpoint"]) / "state.pt")
        batches.load_state_dict(state["loader"])
    seen, steps = list[int](), 0
    for _ in range(batches.epoch, EPOCHS):
        for rows in batches:
            seen += ids(rows)
            model(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == given["stop"]:
                break
        if steps == given["stop"]:
            break
    save(Path(given["out"]) / f"{given['phase']}-{context.get_world_rank()}.json", seen)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"loader": batches.state_dict()}, Path(folder) / "state.pt")
        first = context.get_world_rank() == 0
        report({"steps": steps}, checkpoint=Checkpoint.from_directory(folder) if first else None)


def main(ranks: int, phase: str, rows: str, folder: Path) -> None:
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    ray.init(num_cpus=ranks + 1, include_dashboard=False, runtime_env={"env_vars": passed})
    place = folder / "checkpoint.json"
    done = TorchTrainer(
        train,
        train_loop_config={
            "rows": rows,
            "out": str(folder),
            "phase": phase,
            "stop": STOP if phase == "cut" else 0,
            "checkpoint": json.loads(place.read_text()) if phase in ("rest", "other") else "",
        },
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(storage_path=str(folder), name=phase),
    ).fit()
    if phase == "cut":
        assert done.checkpoint is not None
        place.write_text(json.dumps(done.checkpoint.path))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
