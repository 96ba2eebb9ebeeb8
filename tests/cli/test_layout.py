"""Tables are laid out in lines that fit: long names lose their middle, and optional columns give way."""

from __future__ import annotations

import pytest

from cachesvc.cli.output import LEAST_OPTIONAL, lines, middle

pytestmark = pytest.mark.pure
URI = "s3://a-bucket-with-a-long-name/and/a/long/prefix/train/"


def test_without_a_width_nothing_is_shortened() -> None:
    assert lines(["id", "size>", "uri~"], [["a", "1.0 KiB", URI], ["bcd", "5", "x"]]) == [
        "id      size  uri",
        f"a    1.0 KiB  {URI}",
        "bcd        5  x",
    ]


def test_a_long_uri_loses_its_middle() -> None:
    found = lines(["id", "uri~"], [["a", URI]], 40)
    assert max(map(len, found)) == 40
    assert found[1].startswith("a   s3://a-bucket")
    assert found[1].endswith("prefix/train/")


def test_optional_columns_go_from_the_right_before_a_line_is_too_long() -> None:
    head, _ = lines(["a", "b>?", "c>?", "uri~"], [["1" * 20, "2" * 20, "3" * 20, URI]], 70)
    assert head.split() == ["a", "b", "uri"]
    assert lines(["a", "b"], [["1" * 50, "2" * 50]], 70)[1] == f"{'1' * 50}  {'2' * 50}"


def test_optional_columns_are_shortened_first() -> None:
    found = lines(["waits for~", "uri~?"], [["source, 23 % of its time", URI]], 24 + 2 + LEAST_OPTIONAL)
    assert found[1].startswith("source, 23 % of its time  ")


def test_columns_without_a_title_and_text_are_left_out() -> None:
    assert lines(["a", "", "b"], [["1", "", "2"]]) == ["a  b", "1  2"]
    assert lines(["a", "", "b"], [["1", "x", "2"]]) == ["a     b", "1  x  2"]


def test_control_characters_are_escaped() -> None:
    assert lines(["a"], [["x\x1b[31m\n"]])[1] == r"x\x1b[31m\n"


@pytest.mark.parametrize("width", range(1, 60))
def test_a_shortened_text_has_the_width(width: int) -> None:
    assert len(middle(URI, width)) == min(width, len(URI))
