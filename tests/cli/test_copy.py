"""`cachesvc cat` and `cachesvc cp`, through a daemon and without one."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.__main__ import run
from testbed.node import Daemon
from tests.support import datasets
from tests.support.faults.fake_s3 import Object, fake_s3
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("files") / "data", np.random.default_rng(0)
    files = {"big.bin": rng.bytes(3_000_001), "sub/a.txt": b"a\n", "sub/deep/b.txt": b"b\n", "sub/empty": b""}
    datasets.write_files(root, {**files, ".hidden": b"no"})
    return root


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), ["--ram", "64MiB", "--allow", f"{folder}/"]) as found:
        yield found


@pytest.fixture(params=["off", "socket"])
def words(request: pytest.FixtureRequest, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options that lead to the daemon, or none where it is not to be used."""
    monkeypatch.setenv("CACHESVC", "off")
    return ["--socket", daemon.socket_dir] if request.param == "socket" else []


def test_cat_writes_the_bytes_of_objects_one_after_another(
    words: list[str], folder: Path, capfdbinary: Any
) -> None:
    assert run(["cat", *words, f"{folder}/sub/a.txt", f"cachesvc://file{folder}/big.bin"]) == 0
    assert capfdbinary.readouterr().out == b"a\n" + (folder / "big.bin").read_bytes()
    assert os.environ["CACHESVC"] == "off", "the option is for this command"
    assert run(["cat", *words, f"{folder}/big.bin", "--bytes", "70000-2000000"]) == 0
    assert capfdbinary.readouterr().out == (folder / "big.bin").read_bytes()[70_000:2_000_000]


def test_cp_copies_a_folder_as_it_lies(words: list[str], folder: Path, tmp_path: Path, capsys: Any) -> None:
    datasets.write_files(tmp_path, {"into/sub/a.txt": b"old"})
    assert run(["cp", "--json", *words, str(folder), str(tmp_path / "into")]) == 0
    copied = {str(path.relative_to(tmp_path / "into")): path for path in (tmp_path / "into").rglob("*")}
    bodies = {name: path.read_bytes() for name, path in copied.items() if path.is_file()}
    names = ("big.bin", "sub/a.txt", "sub/deep/b.txt", "sub/empty")
    assert bodies == {name: (folder / name).read_bytes() for name in names}
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["event"], told["files"], told["size_bytes"]) == ("copied", 4, 3_000_005)


def test_cp_copies_one_object_under_its_name(words: list[str], folder: Path, tmp_path: Path) -> None:
    assert run(["cp", *words, f"{folder}/sub/deep/b.txt", str(tmp_path)]) == 0
    assert os.listdir(tmp_path) == ["b.txt"]


def test_an_interrupted_copy_ends_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    (tmp_path / "from").mkdir()
    (tmp_path / "into").mkdir()
    with open(tmp_path / "from" / "large", "wb") as file:
        file.truncate(8 << 30)

    def interrupt() -> None:
        wait_until(lambda: any(path.stat().st_size for path in (tmp_path / "into").iterdir()))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(["cp", str(tmp_path / "from"), str(tmp_path / "into")])
    thread.join()
    assert os.listdir(tmp_path / "into") == []


def test_what_cannot_be_copied_is_one_line_and_its_code(
    words: list[str], folder: Path, tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "file").write_bytes(b"")
    refused = {
        2: [
            ["cat", str(folder)],
            ["cat", f"{folder}/sub/a.txt", "--bytes", "1-3"],
            ["cp", str(folder), "s3://bucket/x"],
            ["cp", str(folder), f"{tmp_path}/file"],
        ],
        4: [["cat", f"{folder}/none"], ["cp", f"{folder}/none", str(tmp_path)]],
    }
    for code, lines in refused.items():
        for line in lines:
            assert run([line[0], *words, *line[1:]]) == code, line
            assert capfd.readouterr().err.count("\n") == 1
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("keys", "code"), [(["a/../../x"], 4), (["a/./x"], 4), (["a//x", "a/x"], 2), (["a/x", "a/x/y"], 2)]
)
def test_keys_that_no_folder_holds_are_refused(
    keys: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with fake_s3() as server:
        for key in keys:
            server.objects[key] = Object(1, "0" * 32, b"x")
        aws = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": server.endpoint}
        for name, value in {**aws, "CACHESVC": "off"}.items():
            monkeypatch.setenv(name, value)
        assert run(["cp", "s3://bkt/a", str(tmp_path / "into" / "here")]) == code
    told = capsys.readouterr().err
    assert any(each in told for each in (("cachesvc cat", "by name") if code == 2 else ("holds no data",)))
    assert not os.listdir(tmp_path)
