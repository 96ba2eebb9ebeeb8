"""What a running daemon takes of changed settings, and what waits for its next start."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from cachesvc.cli import config_file
from cachesvc.cli.serve import serve
from cachesvc.config import ClusterSettings, NvmeSpec, QuotaSpec, Rule, Settings, SourceSection, Tls
from cachesvc.daemon.reload.reloader import compare

RUNNING = Settings(1 << 30, (NvmeSpec("/a", 5), NvmeSpec("/b", share=0.5)), ("s3://b/",), "/run/x", "/state")
OTHERS: dict[str, Any] = {
    "tls": Tls("c", "k", "a"),
    "cluster": ClusterSettings("static:a:1", "a", "a:1"),
    "log_format": "json",
}


def other(name: str) -> Any:
    """A value of another setting than the running one."""
    now = getattr(RUNNING, name)
    return OTHERS.get(name) or (f"{now}x" if isinstance(now, str) else now + 1)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"ram_bytes": 2 << 30}, "ram"),
        ({"nvme": (NvmeSpec("/a", share=0.1), NvmeSpec("/b", share=0.9))}, "nvme"),
        ({"allow": ("s3://c/",)}, "allow"),
        ({"rules": (Rule("s3://b/", (1,), ()),)}, "allow"),
        ({"quota": (QuotaSpec("user", 5),)}, "quota"),
        ({"source": (SourceSection("s3://b/"),)}, "source"),
        ({"log": "DEBUG"}, "log"),
    ],
)
def test_these_change_at_once(change: dict[str, Any], option: str) -> None:
    found = compare(RUNNING, replace(RUNNING, **change))
    assert (found.taken, found.waiting) == ((option,), ())
    assert found.settings == replace(RUNNING, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"ram_bytes": 0},
        {"nvme": (NvmeSpec("/a", 5),)},
        {"nvme": (NvmeSpec("/b", share=0.5), NvmeSpec("/a", 5))},
        {"nvme": (NvmeSpec("/a", 5, mounted=True), NvmeSpec("/b", share=0.5))},
    ],
)
def test_a_tier_comes_goes_or_moves_with_the_next_start(change: dict[str, Any]) -> None:
    found = compare(RUNNING, replace(RUNNING, **change))
    assert (found.taken, found.settings) == ((), RUNNING)
    assert len(found.waiting) == 1


def test_all_other_settings_wait_and_are_named_by_options_of_serve() -> None:
    live = {"ram_bytes", "nvme", "allow", "rules", "quota", "source", "log"}
    of_code = {"filler_threads", "metadata_expiry_s"}
    of_one_command = {"takeover", "origin"}
    keys = config_file.keys(serve)
    for field in fields(Settings):
        if field.name not in live | of_code | of_one_command:
            found = compare(RUNNING, replace(RUNNING, **{field.name: other(field.name)}))
            assert (found.taken, found.settings) == ((), RUNNING), field.name
            assert found.waiting[0].split(",")[0] in keys


def test_a_change_that_waits_does_not_hide_one_that_does_not() -> None:
    found = compare(RUNNING, replace(RUNNING, ram_bytes=5, fillers=RUNNING.fillers + 1))
    assert (found.taken, found.waiting) == (("ram",), ("fillers",))
    assert found.settings == replace(RUNNING, ram_bytes=5)
