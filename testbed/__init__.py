"""What tests and benches share: real daemons, S3 servers and proxies as processes, and readings of what processes use.

Tests and benches import it; it imports the product alone. It is not installed.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""

WAIT_S = 100.0
"""The seconds that a test waits for what must come: enough for a machine a hundred times as slow as an idle one."""
