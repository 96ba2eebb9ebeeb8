"""The chart of deploy/helm and what is made of it, checked against the product. tests/compat/test_chart.py runs Helm."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cachesvc.cli.job_cluster import this_job
from cachesvc.cli.run import run
from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import Registration
from tests.support.deploy import DEPLOY, IMAGE, VERSION, Release, text, verb_of

JOBS = sorted((DEPLOY / "kubernetes" / "jobs").glob("*.yaml"))
POLICIES = {"auto", "require", "off"}


def base(name: str) -> Release:
    return Release(text(f"kubernetes/{name}/cachesvc.yaml"))


@pytest.mark.parametrize("name", ["base", "full"])
def test_a_base_starts_daemons_that_fit_its_manifests(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release = base(name)
    settings = release.check(monkeypatch, tmp_path)
    assert {each["image"] for each in (release.preparing, release.daemon)} == {IMAGE}
    assert release.of("DaemonSet")["minReadySeconds"] > 0
    service = release.of("Service", "-peers")
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert settings.cluster is not None
    assert settings.cluster.members == f"dns+srv://_{service['ports'][0]['name']}._tcp.cachesvc-peers"
    open_membership(settings.cluster.members, Registration("node", "10.0.0.1:7070"))
    assert {path.name for path in (DEPLOY / "kubernetes" / name).iterdir()} == {
        "cachesvc.yaml",
        "kustomization.yaml",
    }


def test_the_full_base_serves_s3_to_its_own_node_and_metrics_to_the_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release = base("full")
    assert release.of("Service", "-s3")["internalTrafficPolicy"] == "Local"
    assert release.settings(monkeypatch, tmp_path).s3_writes
    monitor = release.of("PodMonitor")
    assert release.pod["metadata"]["labels"][monitor["jobLabel"]] == "cachesvc", "alerts select this job"
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == ["metrics"]


def values() -> Any:
    return yaml.safe_load(text("helm/cachesvc/values.yaml"))


def test_the_charts_schema_has_the_settings_of_the_product_and_takes_its_values() -> None:
    made = runpy.run_path(str(DEPLOY / "helm" / "generate.py"))["schema"]()
    assert text("helm/cachesvc/values.schema.json") == made, "run deploy/helm/generate.py --schema"
    schema = json.loads(made)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(values(), schema)
    assert set(schema["properties"]) - {"global"} == set(values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": {"rma": "64GiB"}},
        {"config": {"nvme": ["/mnt/nvme0=80%"]}},
        {"config": {"log-format": "xml"}},
        {"disks": [{"path": "mnt", "budget": "80%"}]},
        {"clutser": True},
    ],
    ids=json.dumps,
)
def test_the_charts_schema_finds_mistakes(wrong: dict[str, Any]) -> None:
    schema = json.loads(text("helm/cachesvc/values.schema.json"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values() | wrong, schema)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load(text("helm/cachesvc/Chart.yaml"))
    assert chart["appVersion"] == VERSION
    assert chart["version"].replace("-", ".") == VERSION


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_job_is_valid_and_unprivileged(path: Path) -> None:
    for each in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(each, "1.37", strict=True)
    pod = each["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        context = container["securityContext"]
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def job(name: str) -> Any:
    *_, found = yaml.safe_load_all(text(f"kubernetes/jobs/{name}.yaml"))
    return found["spec"]


def test_training_job_sees_the_daemons_socket_directory_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release, pod = base("base"), job("train")["template"]["spec"]
    settings = release.settings(monkeypatch, tmp_path)
    (volume,) = pod["volumes"]
    (of_daemon,) = (each for each in release.pod["spec"]["volumes"] if each["name"] == "socket")
    assert volume["hostPath"]["path"] == of_daemon["hostPath"]["path"] == settings.socket_dir
    containers = [*pod["initContainers"], *pod["containers"]]
    for container in containers:
        (mount,) = container["volumeMounts"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert environment["CACHESVC_SOCKET"] == mount["mountPath"]
        assert environment.get("CACHESVC", "require") in POLICIES
    assert pod["securityContext"]["supplementalGroups"] == [release.daemon["securityContext"]["runAsGroup"]]
    prefetch = containers[0]["args"]
    assert containers[0]["image"] == IMAGE
    assert verb_of(["cachesvc", *prefetch]) == "prefetch"
    assert prefetch[-1].startswith(settings.allow)


def test_the_job_that_brings_its_daemons_finds_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = job("job-cluster")
    (container,) = whole["template"]["spec"]["containers"]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    monkeypatch.setattr("socket.getfqdn", lambda: "train-1.train.ns.svc.cluster.local")
    assert len(this_job().members) == whole["completions"] == whole["parallelism"]
    given = run.make_context("run", [*container["command"][2:], *container["args"]]).params
    assert given["job_cluster"]
    assert given["command"] == tuple(container["args"])
    service, _ = yaml.safe_load_all(text("kubernetes/jobs/job-cluster.yaml"))
    assert service["metadata"]["name"] == whole["template"]["spec"]["subdomain"]
    assert f"--rdzv-endpoint=train-0.{service['metadata']['name']}:29500" in container["args"]
