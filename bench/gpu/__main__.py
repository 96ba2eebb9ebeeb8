"""Runs the checks, then the measurements; see the package."""

from __future__ import annotations

import faulthandler
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bench.gpu import checks, data, pictures, training, transfer

HANGS_S = 540
"""After so long every thread's stack is printed, and the run ends."""


def main(folder: str) -> int:
    """Write results.json below `folder`; 1 when a check fails."""
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    has_device = torch.cuda.is_available()
    report: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as root:
        given = data.Data(Path(root, "data"), 16.0 if has_device else 1 / 16)
        began = time.perf_counter()
        data.write(given, 2_048 if has_device else 64)
        say(f"data written in {time.perf_counter() - began:.0f} s")
        if not has_device:
            say("no CUDA device: only the data, a daemon and a small training step are tried")
            with data.daemon(given, "1GiB"):
                measured(folder, report, "training", training.measure(given, "cpu", small=True))
            return 0
        with data.daemon(given, "40GiB"):
            report["checks"] = {check.__name__: passed(check, given) for check in checks.CHECKS[:-1]}
            measured(folder, report, "pictures", pictures.measure(given))
            measured(folder, report, "training", training.measure(given))
            measured(folder, report, "transfer", transfer.measure(given))
        with data.daemon(given, f"{int(given.gib * 1024) + 256}MiB"):
            report["checks"]["recalls"] = passed(checks.CHECKS[-1], given)
    save(folder, report)
    return 0 if all(each["passed"] for each in report["checks"].values()) else 1


def passed(check: Any, given: data.Data) -> dict[str, Any]:
    """Run a check."""
    began = time.perf_counter()
    try:
        note = check(given)
    except Exception:  # noqa: BLE001  the next check is run
        say(f"FAILED {check.__name__}\n{traceback.format_exc()[-1500:]}")
        return {"passed": False, "note": traceback.format_exc()[-1500:]}
    seconds, reserved = time.perf_counter() - began, torch.cuda.memory_reserved() >> 20
    say(f"passed {check.__name__} in {seconds:.1f} s, {reserved} MiB reserved; {note or ''}")
    return {"passed": True, "note": note}


def measured(folder: str, found: dict[str, Any], name: str, figures: Iterator[tuple[str, Any]]) -> None:
    """Run a measurement; print and save each figure as it comes."""
    began, into = time.perf_counter(), found.setdefault(name, {})
    try:
        for figure, value in figures:
            into[figure] = value
            say(f"{time.perf_counter() - began:4.0f} s  {name}: {figure}: {json.dumps(rounded(value))}")
            save(folder, found)
    except Exception:  # noqa: BLE001  the next part is run
        say(f"FAILED {name}\n{traceback.format_exc()[-1500:]}")


def rounded(value: Any) -> Any:
    """Return the value with four digits of each number."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> dict[str, str]:
    """Describe where the figures were measured."""
    facts = {"date": str(date.today()), "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version")
        facts["card"] = torch.cuda.get_device_name()
        facts["driver"] = driver.read_text().partition("\n")[0] if driver.exists() else "unknown"
    return facts


def save(folder: str, found: dict[str, Any]) -> None:
    """Write the results so far."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "results.json").write_text(json.dumps(rounded(found), indent=1))


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "bench/results/gpu"))
