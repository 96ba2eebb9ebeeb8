"""A `Table` is a dictionary by extent, but for the order of its parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.model import ExtentId
from cachesvc.core.records.extent_table import Table

extents = st.binary(min_size=1, max_size=2).map(ExtentId)


@given(st.lists(st.tuples(extents, st.none() | st.integers())), st.sets(extents))
def test_a_table_holds_what_a_dictionary_would(
    changes: list[tuple[ExtentId, int | None]], asked: set[ExtentId]
) -> None:
    table, known = Table[int](), dict[ExtentId, int]()
    for extent, value in changes:
        if value is None:
            assert table.pop(extent) == known.pop(extent, None)
        else:
            table[extent] = known[extent] = value
    assert len(table) == len(known)
    assert {extent: table[extent] for extent in table} == known
    assert list(table.values()) == [known[extent] for extent in table]
    assert [*table] == sorted(known, key=lambda extent: (extent[0], [*known].index(extent)))
    for extent in asked:
        assert (extent in table, table.get(extent)) == (extent in known, known.get(extent))
    assert table.isdisjoint(dict.fromkeys(asked).keys()) == asked.isdisjoint(known)
