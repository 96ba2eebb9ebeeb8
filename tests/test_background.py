"""Fillers give way to whoever wakes up."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from platform import machine

import pytest

from cachesvc.daemon import background

_SHOW = """
import ctypes, os, sys, threading
from cachesvc.daemon.background import run_in_background
def show():
    attributes = ctypes.create_string_buffer(48)
    ctypes.CDLL(None).syscall(int(sys.argv[1]), 0, attributes, 48, 0)
    os.write(1, attributes.raw)
run_in_background()
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""


@pytest.mark.skipif(machine() != "x86_64", reason="the number of sched_getattr(2) is known for x86-64 alone")
def test_what_runs_in_the_background_is_nice_and_has_a_long_slice_in_its_threads_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHOW, "315"], stdout=subprocess.PIPE, check=True, timeout=60
    )
    _, policy, _, niceness, _, slice_ns, _, _ = struct.unpack("=IIQiIQQQ", done.stdout)
    assert policy == os.SCHED_OTHER
    assert niceness == min(19, os.nice(0) + background.NICE)
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 12):
        assert slice_ns == background.SLICE_NS


def test_a_c_library_without_the_call_costs_only_the_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "nice", lambda _: 15)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    background.run_in_background()
