"""The metrics address for a Prometheus server: a valid exposition, bounded in size, about what is there now."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import NotAllowed
from cachesvc.core.histogram import BOUNDS_S, BUCKETS, Histogram, bucket_of
from cachesvc.core.model import DatasetId
from cachesvc.core.stalls import CAUSES, QUANTILES, StallReport
from testbed import ROOT, WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports, two_ports
from tests.support.reading import contents
from tests.support.records import RECORDS
from tests.support.waiting import wait_until

EXTENT, EXTENTS, DATASETS = 64 << 10, 4, 20
MOST_SERIES, MOST_BUCKETS = 1500, 12
DEPLOY = ROOT / "deploy" / "monitoring"
OF_TARGETS = {"job", "instance"}
"""Labels that Prometheus gives all samples of a node."""
REPORT = StallReport(
    5, (200_000,) + (0,) * (len(CAUSES) - 1), (5,) * len(QUANTILES), (3, 0, 2) + (0,) * (BUCKETS - 3)
)


class Node:
    """A node of a cluster with `DATASETS` datasets, of which the last is one user's alone. Half of the second may be
    kept."""

    def __init__(self, root: Path) -> None:
        (self.port,) = free_ports(1)
        member, self.data = f"127.0.0.1:{two_ports()}", root / "data"
        for number in range(DATASETS):
            (self.data / f"{number}").mkdir(parents=True)
            (self.data / f"{number}" / "0.bin").write_bytes(os.urandom(EXTENTS * EXTENT))
        options = ["--ram", "16MiB", "--extent-bytes", str(EXTENT), "--fillers", "1", "--node-name", "n"]
        options += ["--allow", f"{self.data}/", "--allow", f"{self.data}/{DATASETS - 1}/=uid:64001"]
        options += ["--quota", f"{self.data}/1/={2 * EXTENT}", "--metrics", f"127.0.0.1:{self.port}"]
        options += ["--cluster", f"static:{member}", "--advertise", member]
        # In a pod /etc/hosts lies on the disk of the kubelet.
        self.daemon = Daemon(root / "node", options, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})

    def text(self, path: str = "/metrics") -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=WAIT_S) as answer:
            return str(answer.read().decode())

    def families(self) -> dict[str, Metric]:
        """Scrape with the parser of Prometheus's own client."""
        return {
            each.name: each
            for each in text_string_to_metric_families(self.text())
            if each.name.startswith("cachesvc_")
        }

    def value(self, name: str, **labels: str) -> float:
        """The value of a sample; NaN where there is none."""
        found = (each for family in self.families().values() for each in family.samples)
        return next((each.value for each in found if (each.name, each.labels) == (name, labels)), math.nan)

    def opened(self, number: int) -> DatasetId:
        with Control(self.daemon.socket_dir) as control:
            return control.open_dataset([f"{self.data}/{number}/"], RECORDS).id

    def filled(self, number: int) -> DatasetId:
        dataset = self.opened(number)
        with Control(self.daemon.socket_dir) as control:
            assert list(control.prefetch(dataset))[-1].done
        return dataset


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    found = Node(tmp_path_factory.mktemp("metrics"))
    with found.daemon:
        yield found


@pytest.mark.slow
def test_twenty_datasets_are_few_series_of_a_valid_exposition(node: Node) -> None:
    readers = []
    for number in range(DATASETS):
        readers.append(DaemonGrants(node.daemon.socket_dir, node.filled(number)))
        readers[-1].connect()
    for reader in readers:
        reader.waited(REPORT)
    wait_until(lambda: node.value("cachesvc_step_wait_seconds_count") == DATASETS * REPORT.steps)
    families = node.families()
    for reader in readers:
        reader.close()
    (free,) = families["cachesvc_kubelet_disk_free_ratio"].samples
    assert 0 < free.value <= 1
    samples = [each for family in families.values() for each in family.samples]
    ranks = [each.value for each in families["cachesvc_rank_waiting_ratio"].samples]
    assert 0 < len(ranks) < DATASETS, (
        "one is of a dataset that is not for scrapers, and old reports do not count"
    )
    assert all(0 < each <= 1 for each in ranks)
    assert len(samples) <= MOST_SERIES
    keys = Counter((each.name, tuple(sorted(each.labels.items()))) for each in samples)
    assert keys.most_common(1)[0][1] == 1, "no series twice"
    for name, family in families.items():
        assert family.type in ("counter", "gauge", "histogram", "summary"), name
        assert family.documentation.endswith("."), name
        if family.type == "histogram":
            bounds = {each.labels["le"] for each in family.samples if each.name.endswith("_bucket")}
            assert len(bounds) <= MOST_BUCKETS
            assert not any("dataset" in each.labels for each in family.samples), "it adds up over nodes"
    public = [each.labels for each in families["cachesvc_dataset_info"].samples]
    assert sorted(each["uri"] for each in public) == sorted(
        f"file://{node.data}/{number}/" for number in range(DATASETS - 1)
    ), "the last one's name is not for scrapers"
    named = {each["dataset"] for each in public}
    for each in samples:
        assert each.labels.get("dataset", "private") in named | {"private"}, each


def test_dashboard_and_alerts_ask_for_what_the_daemon_serves(node: Node) -> None:
    with closing(DaemonGrants(node.daemon.socket_dir, node.filled(0))) as grants:
        grants.connect()
        grants.waited(REPORT)
        ranks = "cachesvc_rank_waiting_ratio"
        wait_until(lambda: node.families()[ranks].samples)
        served = {name: set[str]() for name in re.findall(r"^# TYPE (\w+)", node.text(), re.MULTILINE)}
        for each in (each for family in node.families().values() for each in family.samples):
            served.setdefault(each.name, set()).update(each.labels)
    served["up"] = set()
    queries = queries_of(DEPLOY)
    assert len(queries) > 50
    for query, legend in queries:
        names = set(re.findall(r"\b(?:cachesvc_\w+|up)\b", re.sub(r'"[^"]*"', "", query)))
        assert names <= served.keys(), query
        for name, matchers in re.findall(r"(\w+)\{(.*?)\}", query):
            assert set(re.findall(r"(\w+)=", matchers)) <= served[name] | OF_TARGETS, query
        known = set.union(OF_TARGETS, *(served[name] for name in names))
        grouped = [re.findall(r"\w+", each) for each in re.findall(r"(?:by|on|group_left) \((.*?)\)", query)]
        asked = {label for each in grouped for label in each} | set(
            re.findall(r"{{ *(?:\$labels\.)?(\w+) *}}", legend)
        )
        assert asked <= known, query


def queries_of(folder: Path) -> list[tuple[str, str]]:
    """The queries of dashboard and alerts, and the text in which their labels stand."""
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    found = [(each["expr"], each["legendFormat"]) for panel in panels for each in panel.get("targets", ())]
    rules = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"][0]["rules"]
    return found + [(rule["expr"], rule["annotations"]["summary"]) for rule in rules]


def test_series_of_an_evicted_dataset_go_away_and_come_back_with_it(node: Node) -> None:
    dataset = node.filled(0)
    with closing(DaemonGrants(node.daemon.socket_dir, dataset)) as grants:
        grants.connect()
        grants.waited(REPORT)
        wait_until(lambda: node.value("cachesvc_loader_batches_total", dataset=dataset) > 0)
    before = node.value("cachesvc_source_bytes_total", dataset=dataset)
    with Control(node.daemon.socket_dir) as control:
        wait_until(lambda: control.evict(dataset).busy_bytes == 0)
    wait_until(lambda: dataset not in node.text())
    node.filled(0)
    assert node.value("cachesvc_source_bytes_total", dataset=dataset) == before + EXTENTS * EXTENT


def test_histograms_count_fills_grants_and_steps(node: Node) -> None:
    with Control(node.daemon.socket_dir) as control:
        control.evict(node.opened(2))
    names = {
        "cachesvc_fill_seconds_count": {"origin": "source"},
        "cachesvc_grant_seconds_count": {"answer": "granted"},
        "cachesvc_step_wait_seconds_count": {},
        "cachesvc_step_wait_seconds_sum": {},
    }
    before = {name: node.value(name, **labels) for name, labels in names.items()}
    with closing(DaemonGrants(node.daemon.socket_dir, node.opened(2))) as grants:
        for answer in grants.acquire(range(EXTENTS), WAIT_S):
            contents(answer)
        grants.waited(REPORT)
        after = [EXTENTS, EXTENTS, REPORT.steps, 0.2]

        def grown() -> list[float]:
            return [round(node.value(name, **labels) - before[name], 3) for name, labels in names.items()]

        wait_until(lambda: grown() == after)
    assert node.value("cachesvc_fill_seconds_bucket", origin="source", le="+Inf") >= EXTENTS
    wait_until(lambda: node.value("cachesvc_source_request_seconds_count") >= 1)  # told every second
    assert node.value("cachesvc_source_request_seconds_sum") > 0
    assert node.value("cachesvc_tier_filled_bytes_total", tier="ram") >= EXTENTS * EXTENT
    assert node.value("cachesvc_tier_granted_bytes_total", tier="ram") >= EXTENTS * EXTENT
    assert node.value("cachesvc_tier_call_seconds_count", tier="ram") > 0
    assert node.value("cachesvc_tier_call_seconds_sum", tier="ram") > 0


def test_quotas_pins_and_refusals_are_counted(node: Node) -> None:
    dataset, pinned = node.filled(1), node.filled(3)
    refused = node.value("cachesvc_events_total", kind="refused")
    with (
        closing(DaemonGrants(node.daemon.socket_dir, dataset)) as grants,
        Control(node.daemon.socket_dir) as control,
    ):
        grants.connect()
        list(control.prefetch(dataset))
        wait_until(lambda: node.value("cachesvc_quota_use_ratio", of="dataset") == 1)
        control.pin(pinned, True)
        assert node.value("cachesvc_pinned_bytes") == EXTENTS * EXTENT
        control.pin(pinned, False)
        for _ in range(2):
            with pytest.raises(NotAllowed):
                control.open_dataset(["s3://elsewhere/"], RECORDS)
    assert node.value("cachesvc_events_total", kind="refused") == refused + 2, "also those that are not kept"
    assert node.value("cachesvc_pinned_bytes") == 0


def test_probes_are_answered_by_what_the_node_knows_of_itself(node: Node) -> None:
    for path in ("/livez", "/readyz"):
        assert node.text(path) == "ok\n"
    with pytest.raises(urllib.error.HTTPError) as refused:
        node.text("/healthz")
    assert refused.value.code == 404


def test_a_bucket_counts_waits_up_to_its_bound() -> None:
    waits = Histogram()
    for bound in BOUNDS_S:
        waits.observe(bound)
    waits.observe(BOUNDS_S[-1] + 1)
    assert waits.counts == [1] * BUCKETS
    assert waits.sum_s == sum(BOUNDS_S) + BOUNDS_S[-1] + 1
    assert (bucket_of(0.0), bucket_of(math.inf)) == (0, BUCKETS - 1)
    assert list(BOUNDS_S) == sorted(BOUNDS_S)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package prometheus)")
def test_promtool_finds_nothing_to_say(node: Node) -> None:
    node.filled(0)
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input="".join(
            line
            for line in node.text().splitlines(True)
            if line.split()[2 * line.startswith("#")].startswith("cachesvc")
        ),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (checked.returncode, checked.stderr, checked.stdout) == (0, "", "")
