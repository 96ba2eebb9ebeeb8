"""Makes the pictures of the status page and of `cachesvc top` in docs/: `python -m bench.screenshots`. Needs Chromium.

A real daemon with a cache smaller than its data serves two training jobs from an S3 server behind a slow link. The pictures
show what the daemon says after a while.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from bench.corpus import digit_images, library_tokens
from cachesvc.cli.top.place import Place
from cachesvc.cli.top.screen import screen
from cachesvc.client.control import Control
from testbed import ROOT
from testbed.browser import chromium, screenshot
from testbed.node import Daemon
from testbed.proxy_process import ProxyProcess
from testbed.servers import SeaweedFS, free_ports

PICTURES = ROOT / "docs" / "pictures"
LIBRARY_BYTES = 24 << 20
PREFETCHED = "s3://corpora/digits/"
WARM_S = float(os.environ.get("WARM_S", "150"))
"""How long the jobs train before the pictures are taken."""
TOKENS = """
import sys, time
from cachesvc.torch import DataLoader, open_dataset
data = open_dataset("s3://corpora/library/", format="tokens", dtype="uint8", seq_len=4096)
batches = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, window=4 << 20)
while True:
    for batch in batches:
        time.sleep(0.15)
"""
DIGITS = """
import time
from cachesvc.torch import DataLoader, open_dataset
data = open_dataset("s3://corpora/digits/", transform=lambda sample: sample[1], image_mode="L")
batches = DataLoader(data, batch_size=32, shuffle=True, num_workers=1)
while True:
    for batch in batches:
        time.sleep(0.1)
"""


def main() -> int:
    """Make the pictures; return the exit code."""
    browser = chromium()
    if browser is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachesvc-pictures-")))
        (root / "nvme").mkdir()
        s3 = stack.enter_context(SeaweedFS(root / "s3"))
        pack(s3)
        link = stack.enter_context(ProxyProcess(s3.endpoint, rate_mb=3, delay_ms=20))
        (port,) = free_ports(1)
        options = ["--ram", "10MiB", "--nvme", f"{root / 'nvme'}=10MiB", "--allow", "s3://corpora/"]
        options += ["--extent-bytes", str(128 << 10), "--metrics", f"127.0.0.1:{port}"]
        daemon = stack.enter_context(Daemon(root / "node", options, s3.env(link.endpoint)))
        env = {**os.environ, **daemon.env, "CACHESVC": "require", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "cachesvc", "prefetch", PREFETCHED], env=env, check=True)
        for script in (TOKENS, DIGITS):
            job = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", script], env=env, start_new_session=True)
            )
            stack.callback(job.kill)
        time.sleep(WARM_S)
        picture_of_top(daemon, PICTURES / "top.svg")
        address = f"http://127.0.0.1:{port}/"
        for scheme in ("light", "dark"):
            screenshot(browser, address, PICTURES / f"page-{scheme}.png", scheme)
    return 0


def picture_of_top(daemon: Daemon, into: Path) -> None:
    """Write the first screen of `cachesvc top` in 80 x 24."""
    console = Console(record=True, width=80, height=24, file=io.StringIO(), force_terminal=True)
    with Control(daemon.socket_dir) as control:
        status = control.status()
    for line in screen(status, Place(), 80, 24):
        console.print(line, soft_wrap=True)
    svg = re.sub(
        r"@font-face \{.*?\}", "", console.export_svg(title="cachesvc top"), flags=re.S
    )  # of another host
    into.write_text(svg.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace"))


def pack(s3: SeaweedFS) -> None:
    """Put the standard library's sources and the digits into a bucket."""
    client = s3.client()
    s3.create_bucket("corpora")
    client.put_object(
        Bucket="corpora", Key="library/tokens.bin", Body=library_tokens(LIBRARY_BYTES).tobytes()
    )
    with ThreadPoolExecutor(8) as pool:
        put = lambda kv: client.put_object(Bucket="corpora", Key=f"digits/{kv[0]}", Body=kv[1])  # noqa: E731
        list(pool.map(put, digit_images()))


if __name__ == "__main__":
    sys.exit(main())
