"""The counting proxy as a process, so that it does not share an interpreter with what is measured."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from types import TracebackType

from testbed import ROOT, WAIT_S
from testbed.proxy import Counts


class ProxyProcess:
    """A `Proxy` in its own process, for measurements. Context manager."""

    def __init__(self, target: str, **options: float | None) -> None:
        """`options` are those of `python -m testbed.proxy`; None stands for the default."""
        given = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None}
        self._arguments = ["--target", target, *(str(each) for option in given.items() for each in option)]

    def __enter__(self) -> ProxyProcess:
        command = [sys.executable, "-m", "testbed.proxy", *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint:
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate(timeout=WAIT_S)

    def counts(self) -> Counts:
        """Counts since the start or the last reset."""
        with urllib.request.urlopen(f"{self.endpoint}/__counts", timeout=WAIT_S) as answer:
            found = json.load(answer)
        return Counts(found["requests"], found["bytes"], Counter(found["by"]), found["gets"])

    def reset(self) -> None:
        """Set the counts to zero."""
        urllib.request.urlopen(f"{self.endpoint}/__reset", timeout=WAIT_S).close()
