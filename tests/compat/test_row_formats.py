"""Rows as each format's own project writes and reads them, and as ours reads them: by two ranks, shuffled and resumed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import ROOT
from tests.support.formats.row_ledger import FORMATS, ledger, ours, rows


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_those_of_the_own_reader(tmp_path: Path, format: str, workers: int) -> None:
    package, _, read = FORMATS[format]
    if package:
        pytest.importorskip(package, reason=f"no {package} here: `make compat` installs it")
    root = tmp_path / "d"
    root.mkdir()
    program = [sys.executable, "-m", "tests.support.formats.row_ledger", format, str(root)]
    subprocess.run(program, cwd=ROOT, check=True, timeout=240, capture_output=True)  # some writers fork
    theirs = shutil.copytree(root, tmp_path / "theirs")  # some readers write beside the data
    assert ours(root, workers) == ledger(read(theirs)) == ledger(rows())
