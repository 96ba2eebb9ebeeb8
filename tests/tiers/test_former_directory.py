"""The directory of releases before 0.2, which had the name of our package: adopted, and never made again."""

from __future__ import annotations

import fcntl
import os
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from cachesvc.core.errors import InvalidInput
from cachesvc.tiers.directory import FORMER_NAME, homes
from cachesvc.tiers.nvme import open_nvme
from tests.support.nvme import NAME, extent, files, put

pytestmark = pytest.mark.pure


def filled(directory: Path, *numbers: int) -> None:
    tier = open_nvme(NAME, directory)
    for number in numbers:
        put(tier, number)
    tier.close()


def former(directory: Path, *numbers: int) -> Path:
    """Lay the extents out as a release before 0.2 did."""
    filled(directory, *numbers)
    home, found = homes(directory)
    home.rename(found)
    return found


def test_nothing_beside_a_script_in_the_directory_is_imported_for_the_package(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    # An editable install is found only after the folder of the script.
    for package in ("cachesvc", "loader"):
        assert PathFinder.find_spec(package, [str(tmp_path)]) is None
    assert PathFinder.find_spec(FORMER_NAME, [str(former(tmp_path).parent)]) is not None


def test_the_extents_of_an_older_release_are_adopted(tmp_path: Path) -> None:
    old = former(tmp_path, 1, 2)
    tier = open_nvme(NAME, tmp_path)
    assert tier.recover() == {extent(1): 5, extent(2): 5}
    assert tier.directory.in_place()
    assert not old.exists()
    tier.close()


def test_after_a_downgrade_the_newer_directory_is_used_and_the_older_gives_its_room_back(
    tmp_path: Path,
) -> None:
    old = former(tmp_path, 1)
    filled(tmp_path, 2)  # adopts
    newer, _ = homes(tmp_path)
    newer.rename(tmp_path / "aside")
    former(tmp_path, 3)
    (tmp_path / "aside").rename(newer)
    tier = open_nvme(NAME, tmp_path)
    assert tier.recover() == {extent(1): 5, extent(2): 5}
    assert not old.exists()
    tier.close()


def test_a_daemon_of_an_older_release_that_runs_keeps_its_directory(tmp_path: Path) -> None:
    old = former(tmp_path, 1)
    lock = os.open(old, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(InvalidInput, match="used by another cachesvc daemon"):
        open_nvme(NAME, tmp_path)
    assert old.is_dir()
    os.close(lock)
    filled(tmp_path, 2)
    assert files(tmp_path) == [extent(1).hex(), extent(2).hex()]


@pytest.mark.parametrize("inside", ["__init__.py", "v1/cachesvc_pb2.py", "cachesvc/v1/x", ".git/HEAD"])
def test_a_checkout_or_package_of_our_name_is_left_alone(tmp_path: Path, inside: str) -> None:
    theirs = tmp_path / FORMER_NAME / inside
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    filled(tmp_path, 1)
    assert theirs.read_text() == "theirs"


def test_a_directory_that_cannot_be_renamed_is_used_where_it_is(tmp_path: Path) -> None:
    old = former(tmp_path, 1)
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("root may rename it")
        tier = open_nvme(NAME, tmp_path)
        assert tier.recover() == {extent(1): 5}
        assert tier.directory.home == old
        tier.close()
    finally:
        tmp_path.chmod(0o700)
