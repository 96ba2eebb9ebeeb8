"""The progress of indexing is in bytes of the data, whatever a format counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from tests.support.catalog_reader import Folder

pytestmark = pytest.mark.pure
FILES = 12


@pytest.mark.parametrize(
    ("options", "name", "body"),
    [
        (Options(format="files"), "{}.bin", b"x" * 400),
        (Options(format="records", record_bytes=8), "{}.bin", b"x" * 400),
        (Options(format="jsonl"), "{}.jsonl", b'{"a": 1}\n' * 40),
    ],
)
def test_objects_and_bytes_are_told_in_bytes(
    tmp_path: Path, options: Options, name: str, body: bytes
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(FILES):
        (data / name.format(number)).write_bytes(body)
    source, told = Folder(), list[tuple[int, int]]()
    found = survey([str(data)], options, lambda uri: source)
    sources = DirectBytes(lambda uri: source)
    build(found, str(tmp_path / "catalog"), lambda uri: source, sources, lambda *each: told.append(each))
    assert told[-1] == (FILES * len(body), FILES * len(body))
    assert told == sorted(told)
