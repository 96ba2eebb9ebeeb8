"""Regenerate the stubs from `proto/`: `make proto`. Needs grpcio-tools (a development dependency)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generate(into: Path) -> None:
    """Write the stubs below `into`, in the package's own layout. Raises RuntimeError when protoc does."""
    from grpc_tools import protoc  # not there in production

    messages, services = ("python", "pyi"), ("python", "pyi", "grpc_python")
    for name, kinds in (("cachesvc", services), ("takeover", messages)):
        outs = [f"--{kind}_out={into}" for kind in kinds]
        code = protoc.main(["protoc", f"-I{ROOT / 'proto'}", *outs, f"cachesvc/v1/{name}.proto"])
        if code:
            raise RuntimeError(f"protoc ended with {code}")


if __name__ == "__main__":
    generate(ROOT)
    sys.exit(0)
