"""The image: Buildah builds it over Debian's Python, and its daemon serves a file."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import ROOT

TOOLS = ("buildah", "mmdebstrap")
LIMIT_S = 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or None in map(shutil.which, TOOLS),
        reason="needs root, and Debian's packages buildah and mmdebstrap",
    ),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """The folder of Buildah's containers and images, which is large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def buildah(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ["--storage-driver", "vfs", "--root", str(store / "root"), "--runroot", str(store / "run")]
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    command = ["buildah", *where, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_the_image_builds_without_pyarrow_and_serves_a_file_to_its_user(store: Path) -> None:
    bootstrap = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--include=python3,python3-venv,ca-certificates",
    ]
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    subprocess.run([*bootstrap, suite, str(store / "base.tar")], check=True, timeout=LIMIT_S)
    (store / "Base").write_text("FROM scratch\nADD base.tar /\n")
    based = buildah(store, "bud", "--quiet", "--file", str(store / "Base"), "--tag", "base", str(store))
    assert based.returncode == 0, based.stderr
    built = buildah(
        store,
        *("bud", "--network", "host", "--build-arg", "BASE=localhost/base", "--tag", "cachesvc"),
        *(
            "--volume",
            "/etc/ssl/certs:/etc/ssl/certs:ro",
        ),  # a mirror may have an authority of this machine alone
        *("--ignorefile", "deploy/Dockerfile.dockerignore", "--file", "deploy/Dockerfile", "."),
    )
    assert built.returncode == 0, built.stderr + built.stdout
    assert "pyarrow" not in built.stdout
    name = buildah(store, "from", "--quiet", "localhost/cachesvc").stdout.strip()
    script = "umask 77; mkdir /tmp/data; echo hello >/tmp/data/a; id -u; ls -A /src 2>/dev/null; "
    script += "exec cachesvc run --ram 64MiB --allow /tmp/data -- cachesvc cat /tmp/data/a"
    done = buildah(store, "run", name, "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "10001\nhello\n"), done.stderr
