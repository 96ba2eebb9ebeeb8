"""Programs read files through fsspec, with a daemon and without one."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from cachesvc.core.errors import NotFound
from cachesvc.gateway.filesystem import CachedFileSystem
from testbed import WAIT_S

pytestmark = pytest.mark.usefixtures("way")


def url(folder: Path, name: str = "") -> str:
    return f"cachesvc://file{folder}/{name}".rstrip("/")


def test_a_file_reads_and_seeks_as_a_local_one(fs: CachedFileSystem, folder: Path) -> None:
    whole = (folder / "big.bin").read_bytes()
    with fs.open(url(folder, "big.bin")) as file, open(folder / "big.bin", "rb") as local:
        assert file.size == len(whole)
        for at, size in [(0, 10), (65_530, 12), (131_072, 300_000), (999_990, 100), (2_000_000, 5), (7, 0)]:
            assert (file.seek(at), file.read(size), file.tell()) == (
                local.seek(at),
                local.read(size),
                local.tell(),
            )
        assert (file.seek(-3, 2), file.read()) == (local.seek(-3, 2), local.read())
        assert (file.seek(0), file.readline()) == (0, whole.partition(b"\n")[0] + b"\n")
        assert (file.seek(5), file.read()) == (5, whole[5:])


def test_ranges_are_read_as_slices(fs: CachedFileSystem, folder: Path) -> None:
    name, whole = url(folder, "big.bin"), (folder / "big.bin").read_bytes()
    for start, end in [
        (None, None),
        (65_535, 65_537),
        (-10, None),
        (100, -100),
        (999_999, 2_000_000),
        (10, 5),
    ]:
        assert fs.cat_file(name, start, end) == whole[start:end]
    assert fs.cat_ranges([name] * 2, [0, 65_000], [5, 200_000]) == [whole[:5], whole[65_000:200_000]]


def test_a_folder_is_listed_as_a_local_one(fs: CachedFileSystem, folder: Path) -> None:
    local, below = fsspec.filesystem("file"), len(f"file{folder}/")

    def names(found: list[str], base: int = below) -> list[str]:
        return sorted(name[base:] for name in found)

    def expected(found: list[str]) -> list[str]:
        return sorted(name[len(f"{folder}/") :] for name in found if not name.endswith(".zarray"))

    top = url(folder)
    assert names(fs.ls(top, detail=False)) == expected(local.ls(str(folder), detail=False))
    assert names(fs.ls(f"{top}/sub/", detail=False)) == expected(local.ls(f"{folder}/sub", detail=False))
    assert names(fs.find(top)) == expected(local.find(str(folder)))
    assert names(fs.glob(f"{top}/sub/*3.txt")) == expected(local.glob(f"{folder}/sub/*3.txt"))
    assert names(fs.glob(f"{top}/**/*.bin")) == expected(local.glob(f"{folder}/**/*.bin"))
    assert fs.du(f"{top}/sub") == local.du(f"{folder}/sub")
    assert fs.isdir(f"{top}/sub/deep")
    assert fs.isfile(f"{top}/sub/deep/plain.bin")


def test_info_says_size_type_and_version(fs: CachedFileSystem, folder: Path) -> None:
    found = fs.info(url(folder, "sub/07.txt"))
    assert (found["name"], found["size"], found["type"]) == (f"file{folder}/sub/07.txt", 1000, "file")
    assert found["ETag"]
    assert found["uri"] == f"file://{folder}/sub/07.txt"
    assert fs.info(url(folder, "sub"))["type"] == "directory"
    assert fs.ukey(url(folder, "sub/07.txt")) != fs.ukey(url(folder, "sub/08.txt"))


def test_hidden_files_and_odd_names_are_read_by_their_names(fs: CachedFileSystem, folder: Path) -> None:
    for name in (".zarray", "sub/deep/[1]{a,b}.bin"):
        for _ in range(2):  # by itself, then from a folder that was listed
            assert fs.cat_file(url(folder, name)) == (folder / name).read_bytes()
            fs.ls(url(folder))


def test_what_does_not_exist_is_not_found(fs: CachedFileSystem, folder: Path) -> None:
    for _ in range(2):
        assert not fs.exists(url(folder, "none.bin"))
        with pytest.raises(NotFound):
            fs.open(url(folder, "sub/none.bin"))
        fs.ls(url(folder))
    with pytest.raises(IsADirectoryError):
        fs.open(url(folder, "sub"))


def test_chains_and_text_are_read_by_fsspec_open(way: str, folder: Path) -> None:
    with fsspec.open(f"cachesvc::file://{folder}/sub/03.txt") as file:
        assert file.read() == (folder / "sub/03.txt").read_bytes()
    with fsspec.open(url(folder, "sub/deep/plain.bin"), "rt") as file:
        assert file.read() == "plain"


def test_threads_share_a_file_system(fs: CachedFileSystem, folder: Path) -> None:
    name, whole = url(folder, "big.bin"), (folder / "big.bin").read_bytes()

    def check(at: int) -> bool:
        begin = at * 7919 % len(whole)
        return fs.cat_file(name, begin, begin + 70_000) == whole[begin : begin + 70_000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(200)))


FORK = """
import multiprocessing, sys
from pathlib import Path
from cachesvc.gateway.filesystem import CachedFileSystem
from testbed import WAIT_S

def read_on():
    assert file.read(300_000) == whole[200_000:500_000]
    assert fs.cat_file(f"cachesvc://file{folder}/sub/01.txt") == (folder / "sub/01.txt").read_bytes()

folder, fs = Path(sys.argv[1]), CachedFileSystem()
whole = (folder / "big.bin").read_bytes()
file = fs.open(f"cachesvc://file{folder}/big.bin", buffering=0)
assert file.read(200_000) == whole[:200_000]
child = multiprocessing.get_context("fork").Process(target=read_on)
child.start()
child.join()
assert child.exitcode == 0
assert file.read(200_000) == whole[200_000:400_000]
"""


def test_a_forked_child_reads_on(folder: Path) -> None:
    """The parent is a new process: threads of gRPC that other tests leave in this one would hold locks in the child."""
    subprocess.run([sys.executable, "-c", FORK, str(folder)], check=True, timeout=WAIT_S)


def test_a_file_is_pickled_to_another_process(fs: CachedFileSystem, folder: Path) -> None:
    file = fs.open(url(folder, "big.bin"))
    file.seek(65_000)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(_read, (pickle.dumps(file), 1000))
    assert found == (folder / "big.bin").read_bytes()[65_000:66_000]


def _read(pickled: bytes, size: int) -> bytes:
    found: bytes = pickle.loads(pickled).read(size)
    return found


def test_pyarrow_reads_columns_and_folders(fs: CachedFileSystem, way: str, folder: Path) -> None:
    tables = folder / f"tables-{way}"
    tables.mkdir()
    table = pa.table({"n": range(50_000), "text": [str(n) for n in range(50_000)]})
    for part in range(2):
        pq.write_table(table.slice(part * 25_000, 25_000), tables / f"{part}.parquet", row_group_size=5000)
    assert pq.read_table(url(tables, "1.parquet"), columns=["n"], filesystem=fs) == table.slice(
        25_000
    ).select(["n"])
    assert pads.dataset(f"file{tables}", filesystem=fs).to_table().sort_by("n") == table


def test_a_range_of_a_large_file_takes_no_more_memory(fs: CachedFileSystem, tmp_path: Path, way: str) -> None:
    if way == "daemon":
        pytest.skip("the daemon allows another folder alone, and its extents are limited")
    import tracemalloc

    with open(tmp_path / "large", "wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    tracemalloc.start()
    try:
        assert fs.cat_file(url(tmp_path, "large"), 1 << 39, (1 << 39) + 100_000) == bytes(100_000)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_file_says_when_it_was_modified(fs: CachedFileSystem, folder: Path) -> None:
    found = fs.modified(url(folder, "big.bin"))
    assert found.timestamp() == pytest.approx((folder / "big.bin").stat().st_mtime)
    assert found.tzinfo is not None


def test_the_block_cache_of_fsspec_reads_through_it(way: str, folder: Path, tmp_path: Path) -> None:
    chain = f"blockcache::{url(folder, 'big.bin')}"
    with fsspec.open(chain, blockcache={"cache_storage": str(tmp_path)}) as file:
        assert file.read() == (folder / "big.bin").read_bytes()
