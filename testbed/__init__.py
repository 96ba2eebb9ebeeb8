"""Shared by tests and benches: real daemons, S3 servers and proxies as processes, and readings of process resources.

Tests and benches import it. It imports only the product. It is not installed.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""Root folder of the repository."""

WAIT_S = 100.0
"""Time limit of a wait for an event that must come: far longer than it takes on a slow, busy machine."""
