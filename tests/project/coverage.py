"""The lines of the product that pure tests run: `python -m tests.project.coverage FILE`, a report of slipcover as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LEAST = 10


def report(files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for all modules together, and one for each of those with the smallest part of their lines. Modules
    without a line that was run are left to the other tests."""
    run = {name: len(found["executed_lines"]) for name, found in files.items()}
    of = {name: run[name] + len(found["missing_lines"]) for name, found in files.items()}
    part = {name: run[name] / of[name] for name in files if run[name]}
    share = sum(run.values()) / max(1, sum(of.values()))
    yield f"pure tests run {share:.1%} of {sum(of.values()):,} lines of the product, and the least of these modules:"
    for name in sorted(part, key=lambda name: (part[name], name))[:LEAST]:
        yield f"{part[name]:5.0%} of {of[name]:4} lines  {name}"


if __name__ == "__main__":
    print(*report(json.loads(Path(sys.argv[1]).read_text())["files"]), sep="\n")
