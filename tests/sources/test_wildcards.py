"""Wildcards agree with a naive matcher, and no pattern takes long."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachesvc.core.errors import InvalidInput
from cachesvc.sources.uri import Wildcards

CPU_S = 5.0  # a thousand times what is needed; backtracking takes centuries


def obvious(pattern: str, name: str) -> bool:
    """Match by trying every way: `*`, `?`, `[ab]`, `[!ab]`, `/` and whole segments `**`."""

    def segments(wanted: list[str], have: list[str]) -> bool:
        if not wanted:
            return not have
        if wanted[0] == "**":
            least = 1 if len(wanted) == 1 else 0
            return any(segments(wanted[1:], have[skip:]) for skip in range(least, len(have) + 1))
        return bool(have) and segment(wanted[0], have[0]) and segments(wanted[1:], have[1:])

    def segment(wanted: str, have: str) -> bool:
        if not wanted:
            return not have
        if wanted[0] == "*":
            return any(segment(wanted[1:], have[skip:]) for skip in range(len(have) + 1))
        end = wanted.find("]", 3 if wanted[1:2] == "!" else 2) if wanted[0] == "[" else -1
        if end < 0:
            return bool(have) and wanted[0] in ("?", have[0]) and segment(wanted[1:], have[1:])
        body = wanted[1:end]
        fits = bool(have) and (have[0] not in body[1:] if body[0] == "!" else have[0] in body)
        return fits and segment(wanted[end + 1 :], have[1:])

    return segments(pattern.split("/"), name.split("/"))


@contextmanager
def within_cpu_s(limit_s: float) -> Iterator[None]:
    """End the body, even a running regular expression, after `limit_s` seconds of this process's CPU time."""

    def over(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took more than {limit_s} s of processor time")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


TOKENS = st.sampled_from(["a", "b", "*", "?", "/", "**", "/**/", "[ab]", "[!a]", "[", "]", "!", "[]a]", "\n"])


@settings(max_examples=500)
@given(st.lists(TOKENS, max_size=9).map("".join), st.text(alphabet="ab/[]!\n", max_size=9))
@example("a/**", "a")
@example("a/**", "a/")
@example("**", "")
@example("**/a", "a")
@example("a/**/**/b", "a/b")
@example("*a*b", "ab")
@example("a*a", "a")
@example("[]", "[]")
@example("[!]", "[!]")
def test_matches_agree_with_a_naive_matcher(pattern: str, name: str) -> None:
    assert Wildcards(pattern).matches(name) == obvious(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "fits", "not_these"),
    [
        ("[a-c]", "abc", "d-"),
        ("[a-]", "a-", "b"),
        ("[!a-c]", "d-^", "abc"),
        ("[^a]", "^a", "b"),
        ("[a-c-e]", "abc-e", "d"),
        ("[+-9]", "+.9", "/:"),
        ("[\\d]", "\\d", "0"),
        ("[[]", "[", "]"),
        (".", ".", "a"),
    ],
)
def test_classes_and_plain_characters(pattern: str, fits: str, not_these: str) -> None:
    wanted = Wildcards(pattern)
    assert [one for one in fits if not wanted.matches(one)] == []
    assert [one for one in not_these if wanted.matches(one)] == []


def test_a_range_that_ends_before_it_starts_is_a_typed_error() -> None:
    with pytest.raises(InvalidInput, match=r"\[z-a\]"):
        Wildcards("x/[z-a]")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*" + "[a-z0-9-]*" * 18 + "Z", "train-shard-0000000000-of-0000000999.bin"),
        ("*a" * 500 + "b", "a" * 1024),
        ("*" + "a" * 500 + "b*", "a" * 1024),
        ("**/a/" * 200 + "b", "/".join("a" * 400)),
        ("**/" + "*a*a*a*b/" * 30 + "**/b", "/".join(["a" * 30] * 60)),
    ],
)
def test_no_pattern_takes_long(pattern: str, name: str) -> None:
    with within_cpu_s(CPU_S):
        assert not Wildcards(pattern).matches(name)
