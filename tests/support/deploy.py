"""The files of deploy/ as the product reads them: command lines, variables, and the manifests of a release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cachesvc import config
from cachesvc.cli import cli
from cachesvc.cli.serve import settings_of
from cachesvc.daemon.metrics.scrape_server import ANSWER_S
from cachesvc.daemon.ports import next_port
from testbed import ROOT

DEPLOY = ROOT / "deploy"
_VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
assert _VERSION is not None
VERSION = _VERSION[1]
IMAGE = f"cachesvc:{VERSION}"
OVERHEAD_BYTES = 4 << 30
"""What a daemon may need beside its RAM tier: processes, buffers, pages that are being written."""


def text(name: str) -> str:
    """Return the text of a file."""
    return (DEPLOY / name).read_text()


def instructions(word: str) -> list[str]:
    """Return the arguments of each such instruction of the Dockerfile, continued lines joined."""
    joined = text("Dockerfile").replace("\\\n", " ")
    return re.findall(rf"^{word} +(.+)$", joined, re.MULTILINE)


def image_environment() -> dict[str, str]:
    """Return the variables of the image."""
    return dict(pair.split("=", 1) for pair in instructions("ENV")[0].split())


def verb_of(command: list[str]) -> str:
    """Return the verb of a `cachesvc` command line; click raises UsageError when it would not parse."""
    program, verb, *arguments = command
    assert program == "cachesvc"
    cli.all_commands()[verb].make_context(verb, arguments)
    return verb


def daemon_settings(
    monkeypatch: pytest.MonkeyPatch, command: list[str], environment: dict[str, str]
) -> config.Settings:
    """Return the settings that `cachesvc serve` makes of a command line, validated as it validates them."""
    verb, *arguments = command
    serve = cli.all_commands()[verb]
    known = {option.envvar for option in serve.params}
    assert {name for name in environment if name.startswith("CACHESVC")} <= known
    with monkeypatch.context() as patch:
        for name in known | {"STATE_DIRECTORY"}:
            patch.delenv(str(name), raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        given = serve.make_context(verb, arguments).params
        del given["json"]
        settings = settings_of(**given)
    config.validate(settings)
    return settings


def directories(settings: config.Settings) -> set[str]:
    """Return all that a daemon writes to."""
    return {settings.socket_dir, settings.state_dir, *(spec.path for spec in settings.nvme)}


def by_name(items: list[Any]) -> dict[str, Any]:
    """Return the items of a list of a manifest by their names."""
    return {each["name"]: each for each in items}


class Release:
    """The manifests of one release of the chart, on a node named node1 in the zone eu-1a."""

    def __init__(self, manifests: str, address: str = "10.0.0.1") -> None:
        self.address = f"[{address}]" if ":" in address else address
        self.objects = {
            (each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(manifests)
        }
        self.name = next(name for kind, name in self.objects if kind == "DaemonSet")
        self.pod = self.of("DaemonSet")["template"]
        (self.preparing,), (self.daemon,) = (self.pod["spec"][k] for k in ("initContainers", "containers"))
        self._fields = {
            "spec.nodeName": "node1",
            "status.podIP": address,
            "metadata.labels['topology.kubernetes.io/zone']": "eu-1a",
        }

    def of(self, kind: str, suffix: str = "") -> Any:
        """Return the `spec` of an object by its kind and what its name has after the release's."""
        return self.objects[kind, self.name + suffix]["spec"]

    def settings(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> config.Settings:
        """Return the settings of the daemon; `folder` stands in for that of its configuration file."""
        file = folder / "config.toml"
        file.write_text(self.objects["ConfigMap", self.name]["data"][file.name])
        arguments = [*self.daemon["args"], "--config", str(file)]
        return daemon_settings(monkeypatch, arguments, image_environment() | self._environment())

    def _environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in self.daemon.get("env", []):
            value = (
                each["value"] if "value" in each else self._fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            )
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
        return found

    def check(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> config.Settings:
        """Assert that Kubernetes takes the objects, that they fit one another and the product; return the settings."""
        for (kind, _), each in self.objects.items():
            if kind != "PodMonitor":
                kubernetes_validate.validate(each, "1.37", strict=True)
        settings = self.settings(monkeypatch, folder)
        assert settings.socket_mode == 0o660
        self._check_directories(settings)
        self._check_ports(settings)
        self._check_probes(settings)
        self._check_selectors()
        limit = config.parse_size(self.daemon["resources"]["limits"]["memory"] + "B")
        assert limit >= settings.ram_bytes + OVERHEAD_BYTES
        return settings

    def _check_directories(self, settings: config.Settings) -> None:
        mounts = {mount["mountPath"]: mount for mount in self.daemon["volumeMounts"]}
        volumes = by_name(self.pod["spec"]["volumes"])
        assert {mount["name"] for mount in mounts.values()} == set(volumes)
        for cache in settings.nvme:
            assert cache.mounted
            assert "subPath" not in mounts[str(Path(cache.path).parent)], (
                "a mounted disk is a whole file system"
            )
        assert directories(settings) - {cache.path for cache in settings.nvme} <= set(mounts)
        assert set(self.preparing["args"]) == directories(settings)
        assert volumes["config"]["configMap"]["name"] == self.name
        assert mounts["/etc/cachesvc"]["name"] == "config"
        user = instructions("USER")[0].split(":")
        assert [self.preparing["command"][i] for i in (3, 5)] == user
        context = self.daemon["securityContext"]
        assert [str(context[key]) for key in ("runAsUser", "runAsGroup")] == user
        assert self.pod["spec"]["securityContext"]["fsGroup"] == context["runAsGroup"]
        if tls := settings.tls:
            folder = mounts[str(Path(tls.certificate).parent)]
            assert folder["name"] == "tls"
            names = {Path(file).name for file in (tls.certificate, tls.key, tls.ca)}
            made = dict(re.findall(r"--from-file=(\S+)=(\S+)", text("helm/cachesvc/values.yaml")))
            assert names == set(made)

    def _check_ports(self, settings: config.Settings) -> None:
        ports = {name: each["containerPort"] for name, each in by_name(self.daemon["ports"]).items()}
        used = {"metrics": settings.metrics, "s3": settings.s3}
        if settings.cluster:
            own = settings.cluster.advertise
            assert (settings.cluster.node_name, settings.cluster.zone) == ("node1", "eu-1a")
            assert own == f"{self.address}:7070"
            used |= {"peers": own, "extents": next_port(own)}
        assert ports == {name: int(str(at).rpartition(":")[2]) for name, at in used.items() if at}
        for kind, service in ((k, o["spec"]) for (k, _), o in self.objects.items() if k == "Service"):
            for port in service["ports"]:
                assert ports[port["targetPort"]] == port["port"], kind
        if ("NetworkPolicy", self.name) in self.objects:
            rules = self.of("NetworkPolicy")["ingress"]
            open_to = {each["port"]: "from" in rule for rule in rules for each in rule["ports"]}
            assert open_to == {name: name in ("peers", "extents") for name in ports}

    def _check_probes(self, settings: config.Settings) -> None:
        for kind in ("startup", "readiness", "liveness"):
            probe = self.daemon[f"{kind}Probe"]
            path = "/livez" if kind == "liveness" else "/readyz"
            assert probe["httpGet"] == {"path": path, "port": "metrics"}
            assert probe["timeoutSeconds"] > ANSWER_S
        assert settings.metrics.rpartition(":")[0] in ("0.0.0.0", "[::]"), (
            "the kubelet asks at the pod's address"
        )

    def _check_selectors(self) -> None:
        labels = self.pod["metadata"]["labels"].items()
        for (kind, _), each in self.objects.items():
            spec = each.get("spec", {})
            selector = spec.get("podSelector") or spec.get("selector") or {}
            assert selector.get("matchLabels", selector).items() <= labels, kind
        assert self.pod["spec"]["serviceAccountName"] == self.name
        assert ("ServiceAccount", self.name) in self.objects
