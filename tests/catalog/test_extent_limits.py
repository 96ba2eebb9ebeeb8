"""A dataset has at most a million extents, for any extent size and any stated file size."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.listing import BESIDE
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.client.control import Control
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import MAX_EXTENTS, ObjectVersion
from testbed.node import Daemon
from tests.support.catalog_reader import Folder, compiled

PAGE = 4096
FORMATS = {
    "0.bin": Options(format="records", record_bytes=1024),
    "1.bin": Options(format="tokens", dtype="uint16", seq_len=128),
    "0.tar": Options(format="webdataset"),
    "0.jpg": Options(format="files"),
}


def sparse(path: Path, size_bytes: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    return path.parent


def with_extents(options: Options, extent_bytes: int) -> Options:
    return Options(options.format, extent_bytes, options.dtype, options.seq_len, 0, options.record_bytes)


@pytest.mark.parametrize("name", FORMATS)
def test_more_than_a_million_extents_are_refused_before_layout(tmp_path: Path, name: str) -> None:
    data = sparse(tmp_path / "d" / name, MAX_EXTENTS * PAGE + 1024)
    with pytest.raises(InvalidInput, match=r"1,000,000 extents; raise extent_bytes= to \d+") as refused:
        compiled(data, with_extents(FORMATS[name], PAGE))
    assert str(data / name) in str(refused.value)
    assert {path.name for path in tmp_path.iterdir()} == {"d"}


@pytest.mark.slow
def test_a_million_extents_are_allowed_and_the_advised_extent_size_suffices() -> None:
    large, small = ObjectVersion("/large", MAX_EXTENTS * PAGE, "1"), ObjectVersion("/small", 1, "1")
    space = AddressSpace([large, small])
    space.add_run(0, 0, large.size_bytes, PAGE)
    assert len(space) == MAX_EXTENTS
    with pytest.raises(InvalidInput, match=r"extent_bytes= to \d+") as refused:
        space.add([(1, 0, 1)])
    with pytest.raises(InvalidInput, match="/large"):
        space.add_encoded((1, 0, 1), "parquet", 1, 0)
    assert len(space) == MAX_EXTENTS
    (told,) = re.findall(r"extent_bytes= to (\d+)", str(refused.value))
    assert int(told) % PAGE == 0
    space = AddressSpace([large, small])
    space.add_run(0, 0, large.size_bytes, int(told))
    space.add([(1, 0, 1)])


def test_a_huge_sparse_file_is_refused_at_once_and_the_daemon_goes_on(tmp_path: Path) -> None:
    data = sparse(tmp_path / "data/0.bin", 1 << 37)
    options = FORMATS["0.bin"]
    with Daemon(
        tmp_path / "node", ["--ram", "64MiB", "--extent-bytes", "64KiB", "--allow", f"{data}/"]
    ) as daemon:
        with Control(daemon.socket_dir) as control:
            with pytest.raises(InvalidInput, match=r"1,000,000 extents; raise extent_bytes="):
                control.open_dataset([f"{data}/"], options)
            os.truncate(data / "0.bin", 1 << 20)
            assert control.open_dataset([f"{data}/"], options, refresh=True).dataset.extents == 16
        assert "Traceback" not in daemon.log


def test_a_catalog_beside_the_data_with_too_many_extents_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = sparse(tmp_path / "d/0.bin", 5 * PAGE)
    options = with_extents(FORMATS["0.bin"], PAGE)
    built = compiled(data, options)
    (kept,) = tmp_path.glob(".*.catalog")
    (data / BESIDE).write_bytes(kept.read_bytes())
    source = Folder()
    found = survey([str(data)], options, lambda uri: source)
    assert found.id == built.id
    data_of = DirectBytes(lambda uri: source)
    build(found, str(tmp_path / "c"), lambda uri: source, data_of, lambda *_: None, most_beside=4)
    assert "is not used: it has more than 4 extents" in caplog.text
    assert len(Catalog.open(str(kept)).extent_sizes) == 5, "what an older release built is opened"
