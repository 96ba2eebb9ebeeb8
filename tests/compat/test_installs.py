"""Installs the wheel beside protobuf and gRPC versions of training images, and runs the client, commands and loader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from testbed import ROOT
from testbed.node import Daemon

PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]


def ran(
    cwd: Path, *command: str | Path, env: dict[str, str] | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a command in `cwd`, without the packages on this process's own path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=inherited | (env or {}), timeout=timeout_s, capture_output=True, text=True
    )


def installed(cwd: Path, *command: str | Path) -> None:
    done = ran(cwd, *command, timeout_s=600.0)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    installed(folder, sys.executable, *PIP, "wheel", "--no-deps", "-w", folder, ROOT)
    (built,) = folder.glob("cachesvc-*.whl")
    return built


@pytest.fixture(scope="module", params=["protobuf==5.* grpcio==1.68.*", "protobuf==6.*", "protobuf==7.*"])
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the wheel, its requirements and these versions only."""
    folder = tmp_path_factory.mktemp("environment")
    installed(folder, sys.executable, "-m", "venv", folder)
    found = folder / "bin" / "python"
    installed(folder, found, *PIP, "install", wheel, *request.param.split())
    return found


def test_a_client_prefetches_and_sees_what_is_resident(python: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "0.bin").write_bytes(os.urandom(1 << 20))
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", f"{data}/"]) as daemon:
        client: list[str | Path] = [python, "-m", "cachesvc"]
        options = ["--format", "records", "--record-bytes", "1024"]
        filled = ran(tmp_path, *client, "prefetch", data, *options, env=daemon.env)
        assert filled.returncode == 0, filled.stderr
        told = ran(tmp_path, *client, "status", "--json", env=daemon.env)
    (dataset,) = json.loads(told.stdout)["datasets"]
    assert (dataset["dataset"]["samples"], dataset["resident_bytes"]) == (1024, 1 << 20)


def test_without_the_extra_serve_says_what_to_install(python: Path, tmp_path: Path) -> None:
    done = ran(tmp_path, python, "-m", "cachesvc", "serve")
    assert done.returncode == 2
    assert "pip install '.[server]' in a checkout" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_prints_the_version_of_the_project(python: Path, tmp_path: Path) -> None:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    told = ran(tmp_path, python.with_name("cachesvc"), "--version")
    assert (told.returncode, told.stdout) == (0, f"cachesvc, version {found[1]}\n")


def test_the_loader_is_imported_beside_torch_and_without_it_the_error_names_torch(
    python: Path, tmp_path: Path
) -> None:
    missing = ran(tmp_path, python, "-c", "import loader")
    assert "No module named 'torch'" in missing.stderr
    beside = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})"  # for torch
    told = ran(tmp_path, python, "-c", f"{beside}; import loader, cachesvc.torch; print(loader.__file__)")
    assert told.returncode == 0, told.stderr
    assert Path(told.stdout.strip()).is_relative_to(python.parents[1])
