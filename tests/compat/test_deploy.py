"""deploy/ in the hands of Helm, kustomize and a parser of compose files."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from cachesvc.config import SourceSection
from testbed import WAIT_S
from tests.support.deploy import DEPLOY, Release, text

charts = pytest.importorskip("helm_python.chart", reason="no Helm here: `make compat` installs it")
GENERATE = runpy.run_path(str(DEPLOY / "helm" / "generate.py"))
TLS = {"crt": "-----BEGIN CERTIFICATE-----\nAA==\n", "key": "k\n", "ca": "c\n"}
SECTION = {
    "prefix": "s3://ours/",
    "endpoint": "https://minio:9000",
    "requests-per-s": 500,
    "bytes-per-s": 4e8,
}
TWO_DISKS = [{"path": "/mnt/nvme0", "budget": "80%"}, {"path": "/mnt/nvme1", "budget": "1.5TB"}]
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {"cluster": False, "disks": [], "env": [], "networkPolicy": {"enabled": False}},
    "s3 alone": {"cluster": False, "s3": {"enabled": True}},
    "ipv6": {"ipFamily": "IPv6", "s3": {"enabled": True}},
    "certificate": {"tls": TLS},
    "settings": {
        "config": {"fillers": 4, "unplanned-share": 0.05, "extent-bytes": 1 << 27, "source": [SECTION]}
    },
    "pods": {
        "disks": TWO_DISKS,
        "seLinuxOptions": {"type": "spc_t"},
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "",
        "nodeSelector": None,
        "tolerations": None,
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/cachesvc"}},
        "operators": [{"kind": "User", "name": "ann@example.com"}],
    },
}


def rendered(values: dict[str, Any], address: str = "10.0.0.1") -> Release:
    return Release(GENERATE["render"](values), address)


def test_the_bases_are_what_helm_makes_of_the_chart() -> None:
    made = GENERATE["bases"]()
    assert {path: path.read_text() for path in made} == made, "run deploy/helm/generate.py"


@pytest.mark.parametrize("values", VARIANTS.values(), ids=list(VARIANTS))
def test_what_helm_makes_of_other_values_fits_the_product(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = "fd00::1" if values.get("ipFamily") == "IPv6" else "10.0.0.1"
    settings = rendered(values, address).check(monkeypatch, tmp_path)
    assert (settings.cluster is not None) == values.get("cluster", True)
    assert bool(settings.s3) == ("s3" in values)
    assert len(settings.nvme) == len(values.get("disks", [1]))


def test_values_reach_the_daemon_and_its_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = rendered(VARIANTS["settings"]).settings(monkeypatch, tmp_path)
    assert (settings.fillers, settings.unplanned_share, settings.extent_bytes) == (4, 0.05, 1 << 27)
    assert settings.source == (
        SourceSection("s3://ours/", "https://minio:9000", requests_per_s=500, bytes_per_s=400_000_000),
    )
    pod = rendered(VARIANTS["pods"]).pod["spec"]
    assert pod["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert not {"priorityClassName", "nodeSelector", "tolerations"} & set(pod)
    secret = rendered(VARIANTS["certificate"]).objects["Secret", "cachesvc-tls"]
    assert list(secret["stringData"].values()) == list(TLS.values())


@pytest.mark.parametrize(
    "wrong", [{"config": {"rma": "1GiB"}}, {"cluster": "yes"}, {"disk": []}], ids=json.dumps
)
def test_helm_refuses_values_that_the_product_would_not_take(wrong: dict[str, Any]) -> None:
    from helm_python.errors import HelmValuesError

    with pytest.raises(HelmValuesError):
        GENERATE["render"](wrong)


def test_helm_finds_nothing_to_mend_in_the_chart() -> None:
    report = charts.lint(GENERATE["CHART"], strict=True)
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("name", ["base", "full"])
def test_kustomize_builds_the_base_and_what_lies_over_it(name: str, tmp_path: Path) -> None:
    folder = DEPLOY / "kubernetes" / name
    assert objects(kustomize(folder)) == objects(text(f"kubernetes/{name}/cachesvc.yaml"))
    shutil.copytree(folder, tmp_path / "base")
    overlay = {
        "namespace": "cache",
        "resources": ["../base"],
        "images": [{"name": "cachesvc", "newTag": "1"}],
    }
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    release = Release(kustomize(tmp_path / "mine"))
    assert release.daemon["image"] == "cachesvc:1"
    assert {each["metadata"]["namespace"] for each in release.objects.values()} == {"cache"}


def kustomize(folder: Path) -> str:
    """Return what kubectl's kustomize builds of a folder."""
    program = shutil.which("kubectl", path=sysconfig.get_path("scripts"))
    if program is None:
        pytest.skip("no kubectl here: `make compat` installs it")
    command = [program, "kustomize", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout


def objects(manifests: str) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(manifests)}


def test_the_compose_file_is_one() -> None:
    compose = pytest.importorskip(
        "compose_spec", reason="no parser of compose files: `make compat` installs it"
    )
    given, options = text("compose/compose.yaml"), compose.PyOptions(apply_merge=True)
    options.from_yaml(given).validate()
    with pytest.raises(ValueError, match="comand"):
        options.from_yaml(given.replace("command:", "comand:"))
