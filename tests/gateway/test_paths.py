"""`cachesvc.path`: paths of objects, for programs that open and map files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import cachesvc
from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, NotFound, OutOfSpace
from cachesvc.core.model import DatasetId
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support import datasets
from tests.support.waiting import wait_until

SIZE = 20 << 20
"""Of the weights: extents of other datasets are cut at 8 MiB."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a model lies in a bucket."""
    folder = tmp_path_factory.mktemp("model") / "model"
    datasets.write_files(folder, {"tokenizer.json": b"{}", "empty": b"", "odd[1].json": b"[1]"})
    save_file({"w": torch.arange(SIZE // 4, dtype=torch.int32)}, str(folder / "model.safetensors"))
    torch.save({"w": torch.arange(100_000)}, folder / "model.pt")
    np.save(folder / "rows.npy", np.arange(40_000).reshape(-1, 4))
    dcp.save({"w": torch.arange(1000)}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ["--ram", "64MiB", "--extent-bytes", "1MiB", "--allow", f"{model}/"]
    with Daemon(tmp_path_factory.mktemp("node"), options) as found:
        yield found


@pytest.fixture(params=["off", "require"])
def way(request: pytest.FixtureRequest, shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> str:
    """The value of CACHESVC; both are to read the same."""
    monkeypatch.setenv("CACHESVC", request.param)
    monkeypatch.setenv("CACHESVC_SOCKET", shared.socket_dir)
    return str(request.param)


@pytest.fixture
def daemon(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    monkeypatch.setenv("CACHESVC", "require")
    monkeypatch.setenv("CACHESVC_SOCKET", shared.socket_dir)
    return shared


def test_libraries_map_an_object_by_its_path(way: str, model: Path) -> None:
    with (
        cachesvc.path(model / "model.safetensors") as path,
        safe_open(path, "pt") as weights,
    ):
        assert path.startswith("/proc/self/fd/") == (way == "require")
        assert weights.get_slice("w")[-3:].tolist() == [SIZE // 4 - 3, SIZE // 4 - 2, SIZE // 4 - 1]
    with cachesvc.path(f"cachesvc://file{model}/model.pt") as path:
        assert int(torch.load(path, mmap=True)["w"][-1]) == 99_999
    with cachesvc.path(f"file://{model}/rows.npy") as path:
        rows = np.load(path, mmap_mode="r")
        assert np.memmap(path, np.uint8, "r").tobytes() == (model / "rows.npy").read_bytes()
    assert rows[-1].tolist() == [39_996, 39_997, 39_998, 39_999], "a mapping may outlive the path"
    with cachesvc.path(model / "odd[1].json") as path:
        assert Path(path).read_bytes() == b"[1]"


def test_readers_of_checkpoints_take_the_url_of_a_folder(way: str, model: Path) -> None:
    state = {"w": torch.zeros(1000, dtype=torch.int64)}
    dcp.load(state, storage_reader=FsspecReader(f"cachesvc://file{model}/dcp"), no_dist=True)
    assert torch.equal(state["w"], torch.arange(1000))


def source_bytes() -> int:
    """Return the bytes fetched for all datasets since the daemon started."""
    with Control() as control:
        return sum(int(each.source_bytes) for each in control.list())


CHILD = """
import re, sys, cachesvc, numpy
with cachesvc.path(sys.argv[1]) as path:
    found = numpy.memmap(path, numpy.uint8, "r")
    print(found.sum(dtype=int), flush=True)
    sys.stdin.readline()  # until all processes have mapped it
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())
    print(sum(int(re.search(r"Pss: +([0-9]+)", each)[1]) for each in maps if "memfd:" in each), flush=True)
    sys.stdin.readline()  # until all have counted
"""


FORKS = """
import os, sys, cachesvc
with cachesvc.path(sys.argv[1]) as path:
    child = os.fork()
    if not child:
        others = [open(os.devnull) for _ in range(8)]
        os._exit(0 if open(path, "rb").read() == open(sys.argv[1], "rb").read() else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_opens_the_path(daemon: Daemon, model: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(model / "rows.npy")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


def test_processes_share_one_copy_that_is_fetched_once(daemon: Daemon, model: Path) -> None:
    evicted()
    before = source_bytes()
    file, body = model / "model.safetensors", np.fromfile(model / "model.safetensors", np.uint8)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]

    def told() -> list[int]:
        return [int(each.stdout.readline()) for each in readers if each.stdout is not None]

    def go_on() -> None:
        for each in readers:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()

    try:
        assert told() == [body.sum(dtype=int)] * 4
        go_on()
        kilobytes = told()
        assert max(kilobytes) < 1.1 * min(kilobytes), "proportional shares"
        assert 0.95 * len(body) < sum(kilobytes) * 1024 < 1.1 * len(body), "one copy"
        go_on()
        assert [each.wait(WAIT_S) for each in readers] == [0] * 4
    finally:
        for each in readers:
            each.kill()
            each.communicate()
    assert source_bytes() - before == len(body)


def test_a_prefetched_folder_is_mapped_without_the_source(daemon: Daemon, model: Path) -> None:
    evicted()
    assert run(["prefetch", "--format", "whole", str(model)]) == 0
    before = source_bytes()
    for name in ("model.safetensors", "rows.npy", "tokenizer.json"):
        with cachesvc.path(model / name) as path:
            assert Path(path).read_bytes() == (model / name).read_bytes()
    assert source_bytes() == before


def test_the_bytes_cannot_be_written_by_their_path(daemon: Daemon, model: Path) -> None:
    with cachesvc.path(model / "rows.npy") as path:
        for mode in ("r+b", "wb", "ab"):
            with pytest.raises(PermissionError), open(path, mode, buffering=0) as file:  # root may open it
                file.write(b"x")
        assert Path(path).read_bytes() == (model / "rows.npy").read_bytes()


def evicted() -> bool:
    with Control() as control:
        return not [each for each in control.list() if control.evict(DatasetId(each.dataset.id)).busy_bytes]


def test_the_copy_stays_as_long_as_the_path_and_its_lease_ends_with_it(daemon: Daemon, model: Path) -> None:
    with cachesvc.path(model / "rows.npy") as path:
        assert not evicted()
        assert Path(path).read_bytes() == (model / "rows.npy").read_bytes()
    wait_until(evicted)


def test_a_path_outlives_its_daemon(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path, ["--ram", "64MiB", "--allow", f"{model}/"]) as own:
        monkeypatch.setenv("CACHESVC_SOCKET", own.socket_dir)
        with cachesvc.path(model / "rows.npy") as path:
            own.kill()
            own.start()

            def held() -> bool:  # the reader tells the new daemon what it holds
                with Control() as control:
                    return any(tier.held_bytes for tier in control.status().tiers)

            wait_until(held)
            assert Path(path).read_bytes() == (model / "rows.npy").read_bytes()


def test_a_copy_on_a_disk_has_the_bytes_of_the_object_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    options = ["--ram", "1MiB", "--extent-bytes", "1MiB", "--nvme", f"{tmp_path / 'disk'}=64MiB"]
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path / "node", [*options, "--allow", f"{model}/"]) as own:
        monkeypatch.setenv("CACHESVC_SOCKET", own.socket_dir)
        with cachesvc.path(model / "model.safetensors") as path:
            assert Path(path).read_bytes() == (model / "model.safetensors").read_bytes()
        with Control() as control:
            used = {tier.name: tier.used_bytes for tier in control.status().tiers}
        assert used["nvme0"] >= SIZE


def test_an_object_larger_than_every_tier_is_refused_or_read_past_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(
        tmp_path / "node", ["--ram", "4MiB", "--extent-bytes", "1MiB", "--allow", f"{model}/"]
    ) as own:
        monkeypatch.setenv("CACHESVC_SOCKET", own.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        with (
            pytest.raises(OutOfSpace, match=r"the largest tier .* --ram"),
            cachesvc.path(model / "model.safetensors"),
        ):
            pass
        monkeypatch.setenv("CACHESVC", "auto")
        with cachesvc.path(model / "model.safetensors") as path:
            assert Path(path).read_bytes() == (model / "model.safetensors").read_bytes()


def test_what_has_no_path_is_a_typed_error(way: str, model: Path) -> None:
    with pytest.raises(NotFound), cachesvc.path(model / "none"):
        pass
    with pytest.raises(NotFound), cachesvc.path("s3://"):
        pass
    with pytest.raises(IsADirectoryError), cachesvc.path(model):
        pass
    if way == "require":
        with pytest.raises(NotFound, match="empty"), cachesvc.path(model / "empty"):
            pass


def test_an_error_of_the_block_is_the_callers(way: str, model: Path) -> None:
    with pytest.raises(CacheError, match="mine"), cachesvc.path(model / "rows.npy"):
        raise CacheError("mine")
