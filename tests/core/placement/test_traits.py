"""Warnings about settings that should agree, and certificates that end."""

from __future__ import annotations

from dataclasses import replace

from cachesvc.core.placement.traits import (
    DAY_S,
    ClusterWarning,
    Noticed,
    Traits,
    certificate_stage,
    certificates,
    differences,
)

MINE = Traits(release="1", extent_bytes=1 << 18, domain="zone", allow=("s3://a/",), blocks=1)


def kinds(found: list[ClusterWarning]) -> list[str]:
    return [each.kind for each in found]


def text(others: dict[str, Traits], zones: dict[str, str] | None = None) -> str:
    """The one warning about nodes beside "me"."""
    traits = {"me": MINE, **others}
    (found,) = differences("me", traits, zones or dict.fromkeys(traits, ""))
    return found.text


def test_equal_nodes_and_nodes_of_an_older_release_give_no_warning() -> None:
    traits = {"me": MINE, "same": MINE, "old": Traits(release="0.2.0")}
    assert differences("me", traits, dict.fromkeys(traits, "")) == []


def test_a_setting_that_differs_names_nodes_and_the_option() -> None:
    sizes = text({"b": replace(MINE, extent_bytes=1 << 19)})
    assert "of b is 512 KiB, of this node 256 KiB" in sizes
    assert "--extent-bytes" in sizes
    assert "--domain of b is none" in text({"b": replace(MINE, domain="none")})
    allowed = text({"b": replace(MINE, allow=("s3://b/",))})
    assert "not s3://a/, but s3://b/" in allowed
    assert "allows all" in text({"b": replace(MINE, allow=())})
    assert "of b has version 3, of this node 1" in text({"b": replace(MINE, blocks=3)})
    assert differences("me", {"me": MINE, "b": replace(MINE, blocks=2)}, {"me": "", "b": ""}) == []


def test_an_odd_node_gets_one_warning_about_all_others() -> None:
    others = {f"n{number}": replace(MINE, extent_bytes=1 << 19) for number in range(200)}
    assert text(others).startswith("--extent-bytes of n0, n1, n2 and 197 more is 512 KiB")


def test_a_zone_that_is_empty_or_misspelt_is_named() -> None:
    traits = dict.fromkeys(("me", "b", "c"), MINE)
    empty = text(traits, {"me": "a", "b": "a", "c": ""})
    assert empty.startswith("--zone is missing at c")
    assert "'a' (2)" in empty
    misspelt = text(traits, {"me": "a", "b": "a", "c": "A"})
    assert misspelt.startswith("c is alone in zone 'A'")
    assert differences("me", traits, {"me": "a", "b": "b", "c": "c"}) == [], (
        "one node in each zone is no mistake"
    )
    anywhere = dict.fromkeys(traits, replace(MINE, domain="none"))
    assert differences("me", anywhere, {"me": "a", "b": "a", "c": ""}) == []


def test_certificates_are_warned_of_in_three_stages_and_once_they_ended() -> None:
    now = 1000.0
    for days, stage in ((31, None), (30, 30), (8, 30), (7, 7), (1, 1), (0, 0), (-5, 0)):
        assert certificate_stage(int(now + days * DAY_S), now) == stage
    ending = {"a": replace(MINE, certificate_ends=int(now + 6 * DAY_S)), "b": MINE}
    (found,) = certificates({**ending, "c": replace(MINE, certificate_ends=1)}, now)[1:]
    assert found.text == "the certificate of a ends in 7 days or sooner; renew it"
    assert certificates({"b": MINE}, now) == []


def test_a_warning_is_logged_once_when_it_lasts_and_again_when_it_ends() -> None:
    noticed, at = Noticed(), Noticed.LASTS_S
    first = ClusterWarning("zone", "b", "b is alone")
    renamed = replace(first, text="b, c are alone")
    assert noticed.update([first], 0.0) == ([], [])
    assert noticed.update([first], at) == ([first], [])
    assert noticed.update([renamed], at + 1) == ([], [])
    assert noticed.update([], at + 2) == ([], [first])
    assert noticed.update([first], at + 3) == ([], [])
    assert noticed.update([], at + 4) == ([], []), "it did not last"
