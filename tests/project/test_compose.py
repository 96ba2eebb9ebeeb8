"""deploy/compose: its settings in the product, its other files, and its trainer with a real daemon and S3 server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.deploy import DEPLOY, daemon_settings, directories, image_environment, instructions

FOLDER = DEPLOY / "compose"
COMPOSE: Any = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def content(name: str) -> Any:
    return yaml.safe_load(COMPOSE["configs"][name]["content"])


def test_its_daemon_takes_its_settings_and_may_write_to_its_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = SERVICES["daemon"]
    environment = image_environment() | daemon["environment"]
    settings = daemon_settings(monkeypatch, daemon["command"], environment)
    mounted = {each.split(":")[1] for each in daemon["volumes"]}
    assert all(any(path.startswith(mount) for mount in mounted) for path in directories(settings))
    assert mounted <= set(" ".join(instructions("RUN")).split()), "made in the image for its user"
    (job,) = content("prometheus")["scrape_configs"]
    assert job["job_name"] == "cachesvc", "the alerts select it"
    assert job["static_configs"] == [{"targets": [f"daemon:{settings.metrics.rpartition(':')[2]}"]}]


def test_its_services_find_one_another_and_files_that_are_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (FOLDER / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
        assert {each["source"] for each in service.get("configs", ())} <= set(COMPOSE["configs"])
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        if build := service.get("build"):
            assert (FOLDER / build["context"] / build["dockerfile"]).is_file()
    urls = re.findall(r"http://(\w+):", (FOLDER / "compose.yaml").read_text())
    assert set(urls) - {"localhost"} <= set(SERVICES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package prometheus)")
def test_promtool_agrees_with_its_prometheus(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(COMPOSE["configs"]["prometheus"]["content"])
    shutil.copy(DEPLOY / "monitoring" / "alerts.yaml", tmp_path)
    command = ["promtool", "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_its_trainer_trains_through_its_daemon(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    verb, *options = [
        each.replace("/var/lib/cachesvc", str(tmp_path)) for each in SERVICES["daemon"]["command"]
    ]
    assert verb == "serve"
    options = [each for each in options if "metrics" not in each]
    with SeaweedFS() as s3, Daemon(tmp_path / "node", options, s3.env()) as daemon:
        environment = (
            os.environ | s3.env() | daemon.env | {"CACHESVC": SERVICES["trainer"]["environment"]["CACHESVC"]}
        )
        command = [sys.executable, str(FOLDER / "train.py"), "--epochs", "2"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
