"""The files of deploy/, checked against the linters of each format and against the real commands and settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from cachesvc import config
from cachesvc.cli import cli
from cachesvc.cli.run import run
from cachesvc.cli.serve import settings_of
from cachesvc.cluster.addresses import host_addresses
from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import Registration
from cachesvc.core.errors import InvalidInput
from cachesvc.daemon.access.tls import TlsContexts, certificate_end
from cachesvc.daemon.metrics.scrape_server import ANSWER_S
from cachesvc.daemon.ports import next_port
from testbed import ROOT, WAIT_S

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
_VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
assert _VERSION is not None
IMAGE = f"cachesvc:{_VERSION[1]}"
POLICIES = {"auto", "require", "off"}
PODS = {
    "spec.nodeName": "node1",
    "status.podIP": "10.0.0.1",
    "metadata.labels['topology.kubernetes.io/zone']": "eu-1a",
}
"""Fields of a pod that the DaemonSet's container gets as variables."""
OVERHEAD_BYTES = 4 << 30
"""What a daemon may need beside its RAM tier: processes, buffers, pages that are being written."""


def test_dockerfile_is_clean_for_hadolint() -> None:
    scripts = sysconfig.get_path("scripts")
    hadolint = shutil.which("hadolint", path=scripts) or "hadolint"
    found = subprocess.run([hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_dockerfile_copies_what_is_there_and_what_docker_is_sent() -> None:
    sent = {line[1:] for line in text("Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    copied = {name for found in instructions("COPY") if "--from" not in found for name in found.split()[:-1]}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_dockerfile_runs_a_daemon_that_is_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = image_environment()
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["cachesvc"]
    settings = daemon_settings(monkeypatch, json.loads(instructions("CMD")[0]), environment)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instructions("USER")[0])
    made = re.search(r"install -d .* -m 0750 (.+)", text("Dockerfile"))
    assert made is not None
    assert made[1].split() == [settings.socket_dir, settings.state_dir]


def test_dockerfile_health_check_is_a_real_command() -> None:
    _, _, command = instructions("HEALTHCHECK")[0].partition(" CMD ")
    assert verb_of(json.loads(command)) == "status"


def test_docker_run_in_the_comment_starts_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    comment = " ".join(line.strip("# \\") for line in text("Dockerfile").splitlines() if line.startswith("#"))
    run = re.search(rf"docker run (.*?) {IMAGE} (serve .*? --socket-mode \d+)", comment)
    assert run is not None
    settings = daemon_settings(monkeypatch, shlex.split(run[2]), image_environment())
    mounted = re.findall(r"-v (\S+):(\S+)", run[1])
    assert {inside for _, inside in mounted} == directories(settings)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_is_valid_kubernetes(path: Path) -> None:
    kubernetes_validate.validate(yaml.safe_load(path.read_text()), "1.37", strict=True)


def test_manifests_name_one_another_and_this_version() -> None:
    daemons, account, settings = (manifest(n) for n in ("daemonset", "serviceaccount", "configmap"))
    pod = daemons["spec"]["template"]
    assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert daemon()["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    assert daemons["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    images = {each["image"] for kind in ("daemonset", "training-job") for each in containers(kind)}
    assert {name for name in images if "cachesvc" in name} == {IMAGE}


def test_service_of_s3_leads_to_the_node_of_its_client_alone() -> None:
    service, pod = manifest("s3-service")["spec"], manifest("daemonset")["spec"]["template"]
    assert service["internalTrafficPolicy"] == "Local"
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    (address,) = re.findall(r"# CACHESVC_S3: (\S+)", text("kubernetes/configmap.yaml"))
    assert address.endswith(f":{service['ports'][0]['targetPort']}")


def test_daemonset_starts_a_daemon_whose_directories_are_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = daemonset_settings(monkeypatch)
    mounts = {mount["mountPath"]: mount for mount in daemon()["volumeMounts"]}
    (cache,) = settings.nvme
    disk = mounts[str(Path(cache.path).parent)]
    assert cache.mounted
    assert "subPath" not in disk, "only a whole file system is seen to be mounted"
    assert directories(settings) - {cache.path} <= set(mounts)
    preparing = containers("daemonset")[0]
    assert set(preparing["args"]) == directories(settings)
    user = instructions("USER")[0].split(":")
    assert [preparing["command"][i] for i in (3, 5)] == user
    assert [str(daemon()["securityContext"][key]) for key in ("runAsUser", "runAsGroup")] == user


def test_daemonset_is_a_member_that_peers_reach_and_certify(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = daemonset_settings(monkeypatch)
    cluster, tls = settings.cluster, settings.tls
    assert cluster is not None
    assert tls is not None
    assert (cluster.node_name, cluster.zone) == ("node1", "eu-1a")
    ports = {each["containerPort"] for each in daemon()["ports"]}
    addresses = (cluster.advertise, next_port(cluster.advertise), settings.metrics)
    assert ports == {int(address.rpartition(":")[2]) for address in addresses}
    assert cluster.advertise == f"10.0.0.1:{manifest('service')['spec']['ports'][0]['port']}"
    assert cluster.members in text("kubernetes/service.yaml")
    pod = manifest("daemonset")["spec"]["template"]["spec"]
    (volume,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert f"create secret generic {volume['secretName']} " in text("kubernetes/configmap.yaml")
    made = dict(re.findall(r"--from-file=(\S+)=(\S+)", text("kubernetes/configmap.yaml")))
    used = {Path(file).name for file in (tls.certificate, tls.key, tls.ca)}
    assert used == set(made)
    assert pod["securityContext"]["fsGroup"] == daemon()["securityContext"]["runAsGroup"]
    (mount,) = (each for each in daemon()["volumeMounts"] if each["name"] == "tls")
    assert {str(Path(file).parent) for file in (tls.certificate, tls.key, tls.ca)} == {mount["mountPath"]}


def test_daemonset_memory_limit_covers_the_ram_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = daemon()["resources"]
    limit_bytes = config.parse_size(resources["limits"]["memory"] + "B")
    assert limit_bytes >= daemonset_settings(monkeypatch).ram_bytes + OVERHEAD_BYTES
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_daemonset_probes_ask_what_the_daemon_answers(probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = daemon()[probe]["httpGet"]
    assert asked["path"] == ("/livez" if probe == "livenessProbe" else "/readyz")
    (port,) = (each for each in daemon()["ports"] if each["name"] == asked["port"])
    host, _, number = daemonset_settings(monkeypatch).metrics.rpartition(":")
    assert port["containerPort"] == int(number)
    assert host not in ("127.0.0.1", "localhost"), "the kubelet asks at the pod's address"
    assert daemon()[probe]["timeoutSeconds"] > ANSWER_S


def test_training_job_sees_the_daemons_socket_directory_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = daemonset_settings(monkeypatch)
    pod = manifest("training-job")["spec"]["template"]["spec"]
    (volume,) = pod["volumes"]
    assert volume["hostPath"]["path"] == host_path(settings.socket_dir)
    for container in containers("training-job"):
        (mount,) = container["volumeMounts"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert environment["CACHESVC_SOCKET"] == mount["mountPath"]
        assert environment.get("CACHESVC", "require") in POLICIES
    assert settings.socket_mode == 0o660
    assert pod["securityContext"]["supplementalGroups"] == [daemon()["securityContext"]["runAsGroup"]]


def test_training_job_prefetches_what_the_daemon_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = containers("training-job")[0]["args"]
    assert verb_of(["cachesvc", *arguments]) == "prefetch"
    assert arguments[-1].startswith(daemonset_settings(monkeypatch).allow)


def test_unit_starts_a_daemon_in_the_directories_that_systemd_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(unit("ExecStart").replace("%%", "%"))
    environment = dict(
        line.split("=", 1) for line in text("cachesvc.env").splitlines() if line and not line.startswith("#")
    )
    state_dir = f"/var/lib/{unit('StateDirectory')}"
    settings = daemon_settings(monkeypatch, arguments, environment | {"STATE_DIRECTORY": state_dir})
    (cache,) = settings.nvme
    disk = unit("RequiresMountsFor")
    assert cache.mounted
    assert program == f"/opt/cachesvc/bin/{Path(program).name}"
    assert settings.socket_dir == f"/run/{unit('RuntimeDirectory')}"
    assert settings.state_dir == state_dir
    assert unit("ReadWritePaths") == cache.path == unit("ExecStartPre").split()[-1]
    assert unit("AssertPathIsMountPoint") == disk == str(Path(cache.path).parent)
    assert unit("EnvironmentFile") == "/etc/cachesvc/cachesvc.env"
    assert int(unit("RestartPreventExitStatus")) == InvalidInput.code


def test_the_units_node_joins_a_cluster_by_the_lines_in_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dict(re.findall(r"^#?(CACHESVC_\w+)=(.*)$", text("cachesvc.env"), re.MULTILINE))
    settings = daemon_settings(monkeypatch, ["serve"], lines)
    assert settings.cluster is not None
    assert len(host_addresses(settings.cluster.members.removeprefix("static:"))) == 16


def test_the_certificate_that_is_made_serves_all_nodes_and_is_renewed(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    handshake(TlsContexts(tls), TlsContexts(tls, "cachesvc-peers"))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(TlsContexts(tls), TlsContexts(tls, "another-name"))
    before = [Path(file).read_text() for file in (tls.ca, tls.certificate, tls.key)]
    old = TlsContexts(tls, "cachesvc-peers")
    make_certificates(tmp_path)
    after = [Path(file).read_text() for file in (tls.ca, tls.certificate, tls.key)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]
    handshake(TlsContexts(tls), old)


def test_each_node_gets_a_certificate_for_the_common_and_its_own_name(tmp_path: Path) -> None:
    make_certificates(tmp_path, "10.0.0.1", "n2")
    first, second = (certificate_files(tmp_path / node) for node in ("10.0.0.1", "n2"))
    for server, name in ((first, "cachesvc-peers"), (second, "cachesvc-peers"), (second, "n2"), (first, "")):
        handshake(TlsContexts(server), TlsContexts(first, name))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(TlsContexts(first), TlsContexts(second, "n2"))
    keys = {Path(tls.key).read_text() for tls in (first, second)}
    make_certificates(tmp_path, "n2")
    renewed = {Path(tls.key).read_text() for tls in (first, second)}
    assert len(keys & renewed) == 1
    handshake(TlsContexts(second), TlsContexts(first, "cachesvc-peers"))


def test_certificates_begin_an_hour_ago(tmp_path: Path) -> None:
    tls, now = make_certificates(tmp_path, "n1"), time.time()
    for path in (tls.certificate, tls.ca):
        command = ["openssl", "x509", "-in", path, "-noout", "-startdate"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        began = ssl.cert_time_to_seconds(said.strip().removeprefix("notBefore="))
        assert 3600 <= now - began < 3600 + WAIT_S + 2
    assert certificate_end(tls.certificate) > now + 364 * 86_400


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_unit_is_valid_systemd(tmp_path: Path) -> None:
    program = unit("ExecStart").split()[0]
    stand_in = tmp_path / "cachesvc"
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    copy = tmp_path / "cachesvc.service"
    copy.write_text(text("cachesvc.service").replace(f"={program}", f"={stand_in}"))
    found = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_service_gives_dns_the_daemons_and_the_name_in_its_comment() -> None:
    service = manifest("service")
    pod = manifest("daemonset")["spec"]["template"]
    others = manifest("training-job")["spec"]["template"]
    selector = service["spec"]["selector"].items()
    assert selector <= pod["metadata"]["labels"].items()
    assert not selector <= others.get("metadata", {}).get("labels", {}).items()
    (port,) = service["spec"]["ports"]
    name = f"dns+srv://_{port['name']}._{port.get('protocol', 'TCP').lower()}.{service['metadata']['name']}"
    assert re.findall(r"dns\+srv://\S+", text("kubernetes/service.yaml")) == [name]
    open_membership(name, Registration("node", "10.0.0.1:7070"))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]


@pytest.mark.parametrize("code", [0, 3])
def test_slurm_script_runs_training_in_a_cluster_of_the_job(tmp_path: Path, code: int) -> None:
    done = run_slurm_script(tmp_path, ["sh", "-c", f"exit {code}"])
    assert (done.returncode, done.stderr) == (code, "")
    given = run.make_context("run", shlex.split(done.stdout)[1:]).params
    assert given["job_cluster"]
    assert given["command"] == ("sh", "-c", f"exit {code}")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed here")
def test_scripts_are_clean_for_shellcheck() -> None:
    found = subprocess.run(["shellcheck", *map(str, DEPLOY.glob("*.sh"))], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_a_flag_that_does_not_exist_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError):
        daemon_settings(monkeypatch, ["serve", "--cache-size", "1GiB"], {})
    with pytest.raises(AssertionError):
        daemon_settings(monkeypatch, ["serve"], {"CACHESVC_CACHE_SIZE": "1GiB"})
    with pytest.raises(InvalidInput):
        daemon_settings(monkeypatch, ["serve", "--socket-mode", "660"], {})


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def instructions(word: str) -> list[str]:
    """The arguments of each such instruction of the Dockerfile, continued lines joined."""
    joined = text("Dockerfile").replace("\\\n", " ")
    return re.findall(rf"^{word} +(.+)$", joined, re.MULTILINE)


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in instructions("ENV")[0].split())


def run_slurm_script(folder: Path, training: list[str]) -> subprocess.CompletedProcess[str]:
    """Run slurm.sh on one machine with an `srun` that runs its command, and a `cachesvc` that prints its arguments and runs
    the command behind them."""
    programs = {
        "srun": 'exec "$@"',
        "cachesvc": """printf '%q ' "$@"; while test "$1" != --; do shift; done; shift; exec "$@" """,
    }
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", str(DEPLOY / "slurm.sh"), *training]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)


def make_certificates(folder: Path, *nodes: str) -> config.Tls:
    """Run certificates.sh in a folder; return its files, those of the last node where there are some."""
    command = ["bash", str(DEPLOY / "certificates.sh"), "cachesvc-peers", *nodes]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=WAIT_S)
    where = folder.joinpath(*nodes[-1:])
    return certificate_files(where)


def certificate_files(folder: Path) -> config.Tls:
    return config.Tls(*(str(folder / name) for name in ("node.pem", "node.key", "ca.pem")))


def handshake(server: TlsContexts, client: TlsContexts) -> None:
    """Make a connection between two nodes over a pair of sockets. Raises what the client's side raises."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    theirs.settimeout(WAIT_S)

    def serve() -> None:
        with suppress(OSError), server.accept(theirs) as accepted:
            accepted.do_handshake()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours:
            client.connect(ours, "10.0.0.1").close()
    finally:
        thread.join()


def unit(key: str) -> str:
    """The one value of a key of the systemd unit."""
    (value,) = re.findall(rf"^{key}=(.*)$", text("cachesvc.service"), re.MULTILINE)
    return value


def manifest(name: str) -> Any:
    return yaml.safe_load(text(f"kubernetes/{name}.yaml"))


def containers(name: str) -> list[Any]:
    """A manifest's containers in the order in which they run."""
    pod = manifest(name)["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def daemon() -> Any:
    return containers("daemonset")[-1]


def host_path(mount_path: str) -> str:
    """Return the host's directory that is mounted at a path of the daemon's container."""
    (volume,) = (mount["name"] for mount in daemon()["volumeMounts"] if mount["mountPath"] == mount_path)
    volumes = {each["name"]: each for each in manifest("daemonset")["spec"]["template"]["spec"]["volumes"]}
    return volumes[volume]["hostPath"]["path"]


def verb_of(command: list[str]) -> str:
    """The verb of a `cachesvc` command line; click raises UsageError when it would not parse."""
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


def daemonset_settings(monkeypatch: pytest.MonkeyPatch) -> config.Settings:
    environment = image_environment() | manifest("configmap")["data"] | pod_environment()
    return daemon_settings(monkeypatch, daemon()["args"], environment)


def pod_environment() -> dict[str, str]:
    """The variables of the daemon's container, where `PODS` has the values of the downward API."""
    found: dict[str, str] = {}
    for each in daemon()["env"]:
        value = each["value"] if "value" in each else PODS[each["valueFrom"]["fieldRef"]["fieldPath"]]
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
    return found


def directories(settings: config.Settings) -> set[str]:
    """All that a daemon writes to."""
    return {settings.socket_dir, settings.state_dir, *(spec.path for spec in settings.nvme)}
