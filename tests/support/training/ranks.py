"""The ranks of a job as processes, with torchrun's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from testbed.forked import TRAINER, ForkedProcess
from testbed.servers import free_ports


class Job:
    """Runs `python -m tests.support.training.MODULE` with each rank's arguments. Context manager."""

    def __init__(self, folder: Path, module: str, arguments: list[list[str]]) -> None:
        (port,) = free_ports(1)
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{len(arguments)}"}
        own |= {"CACHESVC": "off"}
        self._stderr = [folder / f"stderr{rank}" for rank in range(len(arguments))]
        self.processes = [
            ForkedProcess(
                [sys.executable, "-m", f"tests.support.training.{module}", *each],
                env=os.environ
                | own
                | {
                    "RANK": f"{rank}",
                    "LOCAL_RANK": f"{rank}",
                    "XDG_CACHE_HOME": str(folder / f"cache{rank}"),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr[rank].open("w"),
                preloaded=TRAINER,
            )
            for rank, each in enumerate(arguments)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.close()

    def tell(self, rank: int, line: str) -> None:
        """Write a line to a rank."""
        stdin: Any = self.processes[rank].stdin
        stdin.write(f"{line}\n")
        stdin.flush()

    def line(self, rank: int) -> str:
        """The next line that a rank printed."""
        stdout: Any = self.processes[rank].stdout
        found: str = stdout.readline()
        assert found, self.stderr(rank)
        return found

    def stderr(self, rank: int) -> str:
        """The log of a rank."""
        return self._stderr[rank].read_text()
