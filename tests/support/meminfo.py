"""Contents of /proc/meminfo for tests."""

from __future__ import annotations

MEMINFO = (
    "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:    8192 kB\nHugePages_Total:       0\n"
)
