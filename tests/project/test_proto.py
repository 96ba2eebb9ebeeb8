"""The committed descriptors and type stubs are those of the proto files."""

from __future__ import annotations

from pathlib import Path

from cachesvc.v1.generate import ROOT, generate


def test_descriptors_are_as_fresh_as_the_proto_file(tmp_path: Path) -> None:
    generate(tmp_path)
    for fresh in (tmp_path / "cachesvc" / "v1").iterdir():
        assert fresh.read_bytes() == (ROOT / "cachesvc" / "v1" / fresh.name).read_bytes(), "run `make proto`"


def test_every_method_field_and_message_is_documented() -> None:
    proto = (ROOT / "proto/cachesvc/v1/cachesvc.proto").read_text().splitlines()
    rpcs = [n for n, line in enumerate(proto) if line.strip().startswith("rpc ")]
    assert len(rpcs) == 28
    assert all(proto[n - 1].strip().startswith("//") for n in rpcs)
