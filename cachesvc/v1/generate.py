"""Compile `proto/` to descriptors and type stubs: `make proto`. Needs grpcio-tools (a development dependency)."""

from __future__ import annotations

import sys
from pathlib import Path

from cachesvc.v1.descriptors import FILE

ROOT = Path(__file__).resolve().parents[2]


def generate(into: Path) -> None:
    """Write the descriptors and type stubs below `into`, in the package's layout. Raises RuntimeError if protoc fails."""
    from grpc_tools import protoc  # a development dependency

    folder = into / "cachesvc" / "v1"
    folder.mkdir(parents=True, exist_ok=True)
    outs = [f"--pyi_out={into}", f"--descriptor_set_out={folder / FILE.name}"]
    code = protoc.main(["protoc", f"-I{ROOT / 'proto'}", *outs, "cachesvc/v1/cachesvc.proto"])
    if code:
        raise RuntimeError(f"protoc ended with {code}")


if __name__ == "__main__":
    generate(ROOT)
    sys.exit(0)
