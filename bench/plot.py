"""`python -m bench.plot RESULTS.json PLOT.png`: plot the warm rates of every loader. Needs `.venv-peers` (matplotlib)."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

TITLES = {
    "records": "3,072-byte records",
    "varied": "records of 1.5 to 4.5 KB",
    "tokens": "2,048 x uint16",
    "blobs": "blobs of 110 KB",
    "images": "decoded JPEGs",
    "rows": "1,281,167 records of 128 bytes",
}
COLORS = {"0": "#1f6f8b", "2": "#99a8b2", "2 threads": "#e8a33d"}
"""By the workers of a run."""


def main() -> None:
    """Draw horizontal bars on a logarithmic axis, one panel per kind; a line shows the range of the runs."""
    results: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    figure, panels = pyplot.subplots(1, len(TITLES), figsize=(26, 6), layout="constrained")
    for panel, (kind, title) in zip(panels, TITLES.items()):
        _bars(panel, {k: v for k, v in results["warm"].items() if k.startswith(f"{kind}/") and "runs" in v})
        panel.set_title(f"{title}: samples/s, warm")
    figure.savefig(sys.argv[2], dpi=110)


def _bars(panel: Any, answers: dict[str, Any]) -> None:
    labels = []
    for place, (key, answer) in enumerate(reversed(answers.items())):
        _, peer, workers = key.split("/")
        rates = [run["samples_s"] for run in answer["runs"]]
        middle = statistics.median(rates)
        panel.barh(place, middle, color="#444444" if peer == "limit" else COLORS[workers])
        panel.plot([min(rates), max(rates)], [place, place], color="black", linewidth=1)
        labels.append("the limit" if peer == "limit" else f"{peer}, {workers}")
    panel.set_xscale("log")
    panel.set_yticks(range(len(labels)), labels, fontsize=8)


if __name__ == "__main__":
    main()
