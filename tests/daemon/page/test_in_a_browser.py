"""The status page in a real browser shows the numbers of `cachesvc status --json`, in both colour schemes, and asks nothing
of any other host."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.cli import output
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from testbed import WAIT_S
from testbed.browser import Scheme, chromium, content, screenshot
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.waiting import wait_until

EXTENT = 64 << 10
EXTENTS = 6
NAME = 'a"><b>bold & <script>alert(1)</script>'
"""A folder whose name would be markup."""
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


@pytest.mark.slow
def test_the_page_in_chromium(tmp_path: Path) -> None:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    (port,), data = free_ports(1), tmp_path / NAME.replace("/", "")
    options = ["--ram", "1MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    options += ["--metrics", f"127.0.0.1:{port}", "--allow", str(tmp_path)]
    data.mkdir()
    (data / "0.bin").write_bytes(os.urandom(EXTENTS * EXTENT))
    address, pictures = f"http://127.0.0.1:{port}/", []
    with Daemon(tmp_path / "node", options) as daemon, Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([f"{data}/"], Options(format="records", record_bytes=4096)).id
        reader = DaemonGrants(daemon.socket_dir, dataset, job=0xABCDEF01 << 32)
        reader.acquire([0, 1, 2], WAIT_S)
        wait_until(lambda: control.status().sources.bytes == 3 * EXTENT)  # told every second
        command = [sys.executable, "-m", "cachesvc", "status", "--json"]
        env = {**os.environ, **daemon.env}
        told = json.loads(
            subprocess.run(command, env=env, capture_output=True, check=True, timeout=WAIT_S).stdout
        )
        for scheme in SCHEMES:
            shown, urls = content(program, address, scheme)
            assert urls == {f"{address}status.json"}
            assert 'id="bypassed" class="bad" role="status" hidden' in shown
            text = html.unescape(
                re.sub(r"<[^>]*>", " ", re.sub(r"<(style|script)>.*?</\1>", "", shown, flags=re.S))
            )
            text = " ".join(text.split())
            (row,), (tier,), (job,) = told["datasets"], told["tiers"], told["jobs"]
            assert row["resident_bytes"] == 3 * EXTENT
            for expected in (
                f"cachesvc on {told['node']}",
                "1 reader, 0 fills under way",
                f"{output.size(tier['used_bytes'])} of {output.size(tier['budget_bytes'])}",
                f"{output.share(tier['used_bytes'], tier['budget_bytes'])} full",
                f"{row['dataset']['uri']} {row['dataset']['id'][:12]}",
                f"50.0 % resident, {output.size(row['resident_bytes'])} of {output.size(row['dataset']['size_bytes'])}",
                f"fetched {output.size(row['source_bytes'])} from the source",
                f"{job['id']} {row['dataset']['uri']}",
                f"{job['readers'][0]['pid']} - 3 - nothing",
                f"reads from sources {told['sources']['requests']}, {output.size(told['sources']['bytes'])}",
            ):
                assert expected in text
            assert 'aria-label="50.0 % resident: about 50 % in RAM, 0 % on NVMe, 0 % on the way"' in shown
            pictures.append(tmp_path / f"{scheme}.png")
            screenshot(program, address, pictures[-1], scheme)
        reader.close()
        control.bypass(True)
        assert 'id="bypassed" class="bad" role="status">bypassed' in content(program, address, "light")[0]
    assert pictures[0].read_bytes() != pictures[1].read_bytes()
