"""The client beside the protobuf and gRPC of trainers' images: built as a wheel, in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import ROOT
from testbed.node import Daemon

PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, *PIP, "wheel", "--no-deps", "-w", folder, ROOT], check=True, timeout=300)
    (built,) = folder.glob("cachesvc-*.whl")
    return built


@pytest.fixture(scope="module", params=["protobuf==5.* grpcio==1.68.*", "protobuf==6.*", "protobuf==7.*"])
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with nothing but the wheel, what it needs, and these versions."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    found = folder / "bin" / "python"
    subprocess.run([found, *PIP, "install", wheel, *request.param.split()], check=True, timeout=600)
    return found


def test_a_client_prefetches_and_sees_what_is_resident(python: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "0.bin").write_bytes(os.urandom(1 << 20))
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", f"{data}/"]) as daemon:
        env = {**os.environ, **daemon.env}
        prefetch = [
            python,
            "-m",
            "cachesvc",
            "prefetch",
            data,
            "--format",
            "records",
            "--record-bytes",
            "1024",
        ]
        subprocess.run(prefetch, check=True, env=env, cwd=tmp_path, timeout=120)
        status = [python, "-m", "cachesvc", "status", "--json"]
        told = subprocess.run(status, check=True, env=env, cwd=tmp_path, timeout=60, capture_output=True)
    (dataset,) = json.loads(told.stdout)["datasets"]
    assert (dataset["dataset"]["samples"], dataset["resident_bytes"]) == (1024, 1 << 20)


def test_without_the_extra_serve_says_what_to_install(python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [python, "-m", "cachesvc", "serve"], cwd=tmp_path, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'cachesvc[server]'" in done.stderr
    assert "Traceback" not in done.stderr
