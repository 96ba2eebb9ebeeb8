"""A headless Chromium: pictures of a page, its content after scripts ran, and the requests that it made."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from testbed import WAIT_S

Scheme = Literal["light", "dark"]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_SCHEMES: dict[Scheme, int] = {"dark": 0, "light": 1}
RUN_MS = 6000
"""How long scripts run before the page is read, in the browser's own time."""


def chromium() -> str | None:
    """The program, or None where none is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def screenshot(
    program: str, address: str, into: Path, scheme: Scheme, width: int = 1160, height: int = 1330
) -> None:
    """Write a picture of a page as PNG. Raises CalledProcessError."""
    _run(program, scheme, f"--screenshot={into}", f"--window-size={width},{height}", address)


def content(program: str, address: str, scheme: Scheme) -> tuple[str, set[str]]:
    """The page as HTML after its scripts ran, and the URLs that it asked for. The browser's own requests, such as for
    updates, do not count, and get nowhere. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="cachesvc-browser-") as folder:
        log = Path(folder) / "net.json"
        html = _run(program, scheme, f"--log-net-log={log}", "--dump-dom", address)
        text = log.read_text()
    try:
        events = json.loads(text)["events"]
    except ValueError:  # the log of a browser that was stopped lacks its end
        events = json.loads(text.rstrip().rstrip(",") + "]}")["events"]
    started = [each["params"] for each in events if "initiator" in each.get("params", {})]
    place = urlsplit(address)
    return html, {each["url"] for each in started if each["initiator"] == f"{place.scheme}://{place.netloc}"}


def _run(program: str, scheme: Scheme, *options: str) -> str:
    with tempfile.TemporaryDirectory(prefix="cachesvc-browser-") as profile:
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
        command += [
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--disable-sync",
            "--disable-default-apps",
            f"--user-data-dir={profile}",
        ]
        command += [f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}"]
        command += [f"--virtual-time-budget={RUN_MS}", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * WAIT_S, check=True)
        return done.stdout
