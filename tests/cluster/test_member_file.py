"""A file of members that is written in other ways than by renaming."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from cachesvc.cluster.membership import Registration
from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import MAX_BYTES
from tests.support.membership.sources import FileSource
from tests.support.membership.watching import Watching
from tests.support.waiting import wait_until

ME = Registration("node-0", "10.0.0.9:7070")
A, B = "10.0.0.1:7070", "10.0.0.2:7070"


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(f"{A}\n10.0.0.2", id="cut"),
        pytest.param(f"{A} {B}\n", id="two on a line"),
        pytest.param("# none\n", id="comments only"),
        pytest.param("\udcff", id="no text"),
        pytest.param("#" * (MAX_BYTES + 1), id="too long"),
    ],
)
def test_an_invalid_file_is_logged_once_and_the_last_list_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    caplog.set_level(logging.INFO, logger="cachesvc.cluster")
    source = FileSource(tmp_path)
    source.set([A])
    with Watching(open_membership(source.spec, ME)) as seen:
        seen.until([A])
        source.path.write_bytes(bad.encode(errors="surrogateescape"))
        wait_until(lambda: len(caplog.records) == 1)
        assert seen.told == 0
        source.path.write_text(f"{A}\n{B}\n")
        seen.until([A, B])
    assert ["last list holds" in record.message for record in caplog.records] == [True, False]


def test_a_folder_that_is_swapped_behind_a_link_is_seen(tmp_path: Path) -> None:
    """Kubernetes updates the files of a ConfigMap so."""
    for version, address in (("1", A), ("2", B)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "members").write_text(f"{address}\n")
    (tmp_path / "now").symlink_to("1")
    with Watching(open_membership(f"file://{tmp_path}/now/members", ME)) as seen:
        seen.until([A])
        (tmp_path / "next").symlink_to("2")
        os.replace(tmp_path / "next", tmp_path / "now")
        seen.until([B])


def test_a_file_that_is_touched_changes_nothing(tmp_path: Path) -> None:
    source = FileSource(tmp_path)
    source.set([A])
    with Watching(open_membership(source.spec, ME)) as seen:
        seen.until([A])
        source.set([A])
        source.replace(f"{B}\n")
        assert {each.address for each in seen.next()} == {B}
