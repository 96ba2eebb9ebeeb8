"""The function that `cachesvc prepare --with` names."""

from __future__ import annotations

import pytest

from cachesvc.core.errors import InvalidInput
from loader.prepare_ahead import function_of
from tests.loader.prepare import pictures


def test_a_function_is_imported_by_its_name() -> None:
    assert function_of(f"{pictures.__name__}:half") is pictures.half


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("half", "MODULE:FUNCTION"),
        (f"{pictures.__name__}:absent", "absent"),
        ("no_module:f", "no_module"),
        (f"{pictures.__name__}:COUNT", "no function"),
    ],
)
def test_a_function_that_is_not_there_is_one_clear_line(named: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        function_of(named)
    assert "\n" not in str(caught.value)
