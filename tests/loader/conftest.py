"""What tests of the loader share."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, numbered_records


@pytest.fixture(scope="module")
def link(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    """A dataset of the module's COUNT records, of which record n holds n."""
    return numbered_records(tmp_path_factory.mktemp("records"), request.module.COUNT)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryLink, dict[str, bytes]]:
    """Files of 0 to 20 KB in extents of 8 KB: some span several extents, some are empty."""
    root = tmp_path_factory.mktemp("blobs")
    rng = np.random.default_rng(1)
    files = {f"{n:03d}.bin": rng.bytes(int(rng.integers(0, 20_000)) if n % 9 else 0) for n in range(61)}
    datasets.write_files(root / "data", files)
    return compiled(root / "data", root, format="files", extent_bytes=8192), files
