"""Compiles files as programs read them, by their names: each is a sample of bytes in extents of its own, in the order of
the names.

So a read of one file fetches nothing of another, and an extent is the same whether the file was opened alone or its folder
was listed. Programs read files in the order of their names, which is the order of extents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from cachesvc.catalog.address_space import AddressSpace, aligned
from cachesvc.catalog.columns import Ints, TextColumn, ints
from cachesvc.catalog.compiler import Draft, Inputs, names_of
from cachesvc.catalog.layout import Field
from cachesvc.core.errors import NotFound
from cachesvc.core.model import PAGE_BYTES

CUT_BYTES = 8 << 20
"""Bytes of a large file that a read of one of them fetches: one request of a fill."""
MOST_EXTENTS = 1 << 17
"""Of more files, neighbours share extents. A daemon takes 330 bytes for each extent: 43 MB."""


def compile_objects(inputs: Inputs) -> Draft:
    """Lay out the files. Raises NotFound where every file is empty."""
    sizes = _sizes(inputs)
    cut = _cut(sizes, min(inputs.options.extent_bytes, CUT_BYTES))
    return _laid_out(inputs, sizes, cut, _runs(sizes.tolist(), cut))


def compile_whole(inputs: Inputs) -> Draft:
    """Lay out each file as one extent, of any size, so that a descriptor of the extent is a descriptor of the file. Raises
    NotFound where every file is empty."""
    sizes = _sizes(inputs)
    alone = ([int(at)] for at in np.flatnonzero(sizes))
    return _laid_out(inputs, sizes, aligned(int(sizes.max()), PAGE_BYTES), alone)


def _sizes(inputs: Inputs) -> Ints:
    sizes = ints(entry.object.size_bytes for entry in inputs.entries)
    if not sizes.sum():
        raise NotFound(f"{inputs.uri} holds no data: every file is empty")
    return sizes


def _laid_out(inputs: Inputs, sizes: Ints, cut: int, runs: Iterable[Sequence[int]]) -> Draft:
    """Return the draft of these runs of files: each run shares an extent, and one file alone is cut into extents."""
    space, firsts = AddressSpace([entry.object for entry in inputs.entries]), array("q")
    addresses = np.zeros(len(sizes), np.int64)
    for files in runs:
        before, size = len(space), int(sizes[files[0]])
        if len(files) == 1:
            addresses[files] = space.add_run(files[0], 0, size, cut)
        else:
            start = space.add((at, 0, int(sizes[at])) for at in files)
            addresses[files] = start + np.cumsum(sizes[files]) - sizes[files]
        firsts.extend([files[0], *[files[0] + 1] * (len(space) - before - 1)])
    firsts[0] = 0
    empty = np.flatnonzero(sizes == 0)  # each lies in the extent of a file before it
    addresses[empty] = ints(space.starts)[np.searchsorted(ints(firsts), empty, "right") - 1]
    draft = Draft("rows", space, (Field("file", ""),), ints([*firsts, len(sizes)]))
    draft.columns = {"row.address": addresses, "row.length": sizes}
    draft.keys = TextColumn(names_of(inputs.entries))
    return draft


def _cut(sizes: Ints, cut: int) -> int:
    """Return the size of extents: `cut`, or more where large files would make too many."""
    while np.sum(-(-sizes // cut)) > MOST_EXTENTS and cut < sizes.max():
        cut *= 2
    return cut


def _runs(sizes: Sequence[int], cut: int) -> Iterator[list[int]]:
    """Yield the files that share extents, without empty ones: one at a time, or of many as many small ones as needed."""
    together, run, total = -(-len(sizes) // MOST_EXTENTS), list[int](), 0
    for at, size in enumerate(sizes):
        if not size:
            continue
        if run and (len(run) == together or total + size > cut):
            yield run
            run, total = [], 0
        run, total = [*run, at], total + size
    if run:
        yield run
