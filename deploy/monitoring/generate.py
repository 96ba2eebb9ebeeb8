"""Writes dashboard.json, for Grafana, and prometheusrule.yaml, for the Prometheus operator, beside this file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SEEN = 'job="cachesvc",instance=~"$instance"'
READ = f"rate(cachesvc_tier_granted_bytes_total{{{SEEN}}}[$__rate_interval])"
NAMED = "* on (dataset) group_left (uri) max by (dataset, uri) (cachesvc_dataset_info)"
WIDTH, HEIGHT, ACROSS = 8, 7, 3
_Panel = tuple[str, str, dict[str, str]]
"""Title, unit of Grafana, and the queries by their legends."""


def rate(metric: str, by: str = "") -> str:
    """Return the query of a counter's rate over the chosen nodes."""
    summed = f"sum by ({by})" if by else "sum"
    return f"{summed} (rate(cachesvc_{metric}{{{SEEN}}}[$__rate_interval]))"


def quantiles(histogram: str, by: str = "") -> dict[str, str]:
    """Return the queries of a histogram's median and 99th percentile over the chosen nodes."""
    buckets = rate(f"{histogram}_bucket", f"le, {by}" if by else "le")
    label = f" {{{{{by}}}}}" if by else ""
    return {f"p{q * 100:.0f}{label}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.99)}


def of(metric: str, legend: str = "{{instance}}") -> dict[str, str]:
    """Return the query of a gauge of each chosen node."""
    return {legend: f"cachesvc_{metric}{{{SEEN}}}"}


def spread(metric: str, by: str) -> dict[str, str]:
    """Return the query of a counter's rate by a label."""
    return {f"{{{{{by}}}}}": rate(metric, by)}


ROWS: dict[str, list[_Panel]] = {
    "Node": [
        (
            "Tiers: used part of the budget",
            "percentunit",
            {
                "{{instance}} {{tier}}": f"cachesvc_tier_used_bytes{{{SEEN}}}"
                f" / (cachesvc_tier_budget_bytes{{{SEEN}}} > 0)"
            },
        ),
        ("Given to readers, by tier", "Bps", {"{{tier}}": f"sum by (tier) ({READ})"}),
        ("Waits of readers for an extent", "s", quantiles("grant_seconds")),
        ("Fills, until readers are served", "s", quantiles("fill_seconds", "origin")),
        ("Calls on tiers", "s", quantiles("tier_call_seconds", "tier")),
        ("Tiers that fail", "short", of("tier_lost", "{{instance}} {{tier}}")),
        ("Bypassed by an operator", "short", of("bypassed")),
        ("Damaged copies", "short", spread("corrupt_extents_total", "tier")),
        ("Free part of the kubelet's disk", "percentunit", of("kubelet_disk_free_ratio")),
        ("Events a second", "short", spread("events_total", "kind")),
    ],
    "Cluster": [
        (
            "Daemons and members",
            "short",
            {
                "daemons that answer": 'sum (up{job="cachesvc"})',
                "members that all see": 'min (cachesvc_nodes{job="cachesvc",state="present"})',
            },
        ),
        ("Nodes by state", "short", {"{{state}}": 'max by (state) (cachesvc_nodes{job="cachesvc"})'}),
        ("Warnings", "short", {"{{kind}}": f"max by (kind) (cachesvc_cluster_warnings{{{SEEN}}}) > 0"}),
        (
            "Between nodes",
            "Bps",
            {"received": rate("peer_received_bytes_total"), "sent": rate("peer_sent_bytes_total")},
        ),
        ("Reads from other nodes", "s", quantiles("peer_read_seconds")),
        (
            "Trouble between nodes, a second",
            "short",
            {
                "late or failed": rate("peer_failures_total"),
                "wrong bytes": f'sum (rate(cachesvc_peer_compared_extents_total{{{SEEN},result="wrong"}}'
                "[$__rate_interval]))",
                "refused": rate("peer_refused_connections_total"),
            },
        ),
    ],
    "Jobs by rank": [
        ("Part of the time that a rank waits", "percentunit", of("rank_waiting_ratio", "{{job}} {{reader}}")),
        (
            "Batches a second of a rank",
            "short",
            of("rank_batches_per_second", "{{job}} {{reader}}"),
        ),
        ("What steps wait for: seconds a second", "s", spread("loader_wait_seconds_total", "cause")),
        ("Waits of steps", "s", quantiles("step_wait_seconds")),
        (
            "Hit rate of the latest epoch, over the best possible",
            "percentunit",
            {"{{uri}}": f"avg by (dataset) (cachesvc_epoch_hits_of_bound{{{SEEN}}}) {NAMED}"},
        ),
        (
            "Demands a second",
            "short",
            {
                "resident": rate("hits_total"),
                "fetched ahead": rate("ahead_total"),
                "waited": rate("misses_total"),
                "read directly": rate("refused_total"),
            },
        ),
    ],
    "Source": [
        (
            "Received",
            "Bps",
            {"bytes": rate("source_read_bytes_total"), "hedges": rate("source_hedge_bytes_total")},
        ),
        (
            "Requests a second",
            "short",
            {name: rate(f"source_{name}_total") for name in ("requests", "retries", "throttled", "hedges")},
        ),
        ("Requests", "s", quantiles("source_request_seconds")),
        (
            "Failed fills a second",
            "short",
            {"{{error}}": f"{rate('failed_fills_total', 'error')} > 0"},
        ),
    ],
    "Cost": [
        (
            "Kept off the bill in the range: bytes given to readers, less bytes of the sources",
            "bytes",
            {
                "bytes": f"sum (increase(cachesvc_tier_granted_bytes_total{{{SEEN}}}[$__range]))"
                f" - sum (increase(cachesvc_source_read_bytes_total{{{SEEN}}}[$__range]))"
                f" - sum (increase(cachesvc_source_hedge_bytes_total{{{SEEN}}}[$__range]))"
            },
        ),
        (
            "Read by jobs, and from sources",
            "Bps",
            {"jobs": f"sum ({READ})", "sources": rate("source_read_bytes_total")},
        ),
        ("From sources, by dataset", "Bps", {"{{uri}}": f"{rate('source_bytes_total', 'dataset')} {NAMED}"}),
        (
            "Resident, by dataset",
            "bytes",
            {"{{uri}}": f"sum by (dataset) (cachesvc_resident_bytes{{{SEEN}}}) {NAMED}"},
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard. Grafana asks for the data source when it is imported."""
    source = {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }
    nodes = {
        "name": "instance",
        "label": "Node",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": 'label_values(cachesvc_build_info{job="cachesvc"}, instance)',
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "cachesvc",
        "uid": "cachesvc",
        "schemaVersion": 39,
        "tags": ["cachesvc"],
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, nodes]},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    top, number = 0, 0
    for row, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": row, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        top += 1
        for place, (title, unit, queries) in enumerate(panels):
            number += 1
            where = {
                "x": place % ACROSS * WIDTH,
                "y": top + place // ACROSS * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            one = len(queries) == 1 and "$__range]" in "".join(queries.values())
            yield {
                "id": number,
                "type": "stat" if one else "timeseries",
                "title": title,
                "gridPos": where,
                "datasource": {"type": "prometheus", "uid": "$datasource"},
                "fieldConfig": {"defaults": {"unit": unit, "min": None if one else 0}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + index), "legendFormat": legend, "expr": query, "instant": one}
                    for index, (legend, query) in enumerate(queries.items())
                ],
            }
        top += -(-len(panels) // ACROSS) * HEIGHT


def prometheus_rule() -> dict[str, Any]:
    """Return the alerts as the Prometheus operator takes them."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "cachesvc", "labels": {"app.kubernetes.io/name": "cachesvc"}},
        "spec": yaml.safe_load((HERE / "alerts.yaml").read_text()),
    }


def files() -> dict[str, str]:
    """Return the text of each file by its name."""
    rule = yaml.safe_dump(prometheus_rule(), sort_keys=False, width=120)
    return {
        "dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        "prometheusrule.yaml": f"# Made of alerts.yaml by generate.py.\n{rule}",
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text)
