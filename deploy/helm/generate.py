"""Writes what is made of the chart and of the product: `config` in values.schema.json, and the bases of ../kubernetes.

It needs Helm as a library: `pip install helm-python-sdk` beside cachesvc. `--schema` writes the schema alone, without Helm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cachesvc.cli.config_file import schema as schema_of
from cachesvc.cli.serve import serve

CHART = Path(__file__).parent / "cachesvc"
SCHEMA = CHART / "values.schema.json"
BASES = Path(__file__).parents[1] / "kubernetes"
SET_BY_CHART = {
    "nvme",
    "metrics",
    "socket",
    "socket-mode",
    "state-dir",
    "node-name",
    "advertise",
    "zone",
    "listen",
}
SET_BY_CHART |= {"cluster", "tls-name", "tls-cert", "tls-key", "tls-ca", "s3", "s3-writes"}
VALUES: dict[str, dict[str, Any]] = {
    "base": {},
    "full": {
        "s3": {"enabled": True, "writes": ["s3://bucket/checkpoints/"]},
        "podMonitor": {"enabled": True},
        "operators": [{"kind": "Group", "name": "cache-operators"}],
    },
}
"""The values of each base."""


def schema() -> str:
    """Return the text of values.schema.json, with the product's settings."""
    settings = schema_of(serve)
    del settings["$schema"], settings["title"]
    for key in SET_BY_CHART:
        del settings["properties"][key]
    found = json.loads(SCHEMA.read_text())
    found["properties"]["config"] = settings
    return json.dumps(found, indent=1) + "\n"


def render(values: dict[str, Any]) -> str:
    """Return the manifests of a release named cachesvc. Raises HelmValuesError for values that the schema forbids."""
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        made = chart.render(values, name="cachesvc", namespace="cache")
    texts = (made[name].strip() for name in sorted(made) if name.endswith(".yaml"))
    return "".join(f"---\n{text}\n" for text in texts if text)


def bases() -> dict[Path, str]:
    """Return the text of each base's manifests by its file."""
    note = "# Made of the chart by deploy/helm/generate.py."
    return {BASES / name / "cachesvc.yaml": f"{note}\n{render(values)}" for name, values in VALUES.items()}


if __name__ == "__main__":
    SCHEMA.write_text(schema())
    if "--schema" not in sys.argv:
        for file, text in bases().items():
            file.write_text(text)
