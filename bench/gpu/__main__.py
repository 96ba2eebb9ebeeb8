"""Runs the checks, then the measurements; see the package."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
import traceback
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bench.gpu import checks, data, pictures, training, transfer


def main(folder: str) -> int:
    """Write results.json below `folder`; 1 when a check fails."""
    has_device = torch.cuda.is_available()
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as root:
        given = data.Data(Path(root, "data"), 2.0 if has_device else 1 / 16)
        began = time.perf_counter()
        data.write(given, 2_048 if has_device else 64)
        say(f"data written in {time.perf_counter() - began:.0f} s")
        if not has_device:
            say("no CUDA device: only the data, a daemon and a small training step are tried")
            with data.daemon(given, "1GiB"):
                found["training"] = training.measure(given, "cpu", small=True)
            return save(folder, found)
        with data.daemon(given, "12GiB"):
            found["checks"] = {check.__name__: passed(check, given) for check in checks.CHECKS[:-1]}
            for part in (transfer, pictures, training):
                found[part.__name__.rpartition(".")[2]] = measured(part, given)
                save(folder, found)
        with data.daemon(given, "2304MiB"):
            found["checks"]["recalls"] = passed(checks.CHECKS[-1], given)
    save(folder, found)
    return 0 if all(each["passed"] for each in found["checks"].values()) else 1


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


def measured(part: Any, given: data.Data) -> Any:
    """Run a measurement, and print it."""
    began = time.perf_counter()
    try:
        found = part.measure(given)
    except Exception:  # noqa: BLE001  the next part is run
        say(f"FAILED {part.__name__}\n{traceback.format_exc()[-1500:]}")
        return traceback.format_exc()[-1500:]
    say(f"{part.__name__} in {time.perf_counter() - began:.0f} s\n{json.dumps(rounded(found), indent=1)}")
    return found


def rounded(value: Any) -> Any:
    """Return the value with four digits of each number."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> dict[str, str]:
    """Describe where the figures were measured."""
    found = {"date": str(date.today()), "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version")
        found["card"] = torch.cuda.get_device_name()
        found["driver"] = driver.read_text().partition("\n")[0] if driver.exists() else "unknown"
    return found


def save(folder: str, found: dict[str, Any]) -> int:
    """Write the results so far."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "results.json").write_text(json.dumps(rounded(found), indent=1))
    return 0


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "bench/results/gpu"))
