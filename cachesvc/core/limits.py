"""Retries and time limits, each with what it is for. docs/faults.md shows them as a table, which a test compares."""

from __future__ import annotations

# Requests to a source

REQUEST_S = 120.0
"""All tries of one read, HEAD or page of a listing; no try starts after it."""
RETRY_FIRST_S = 0.1
"""The most that the first retry of a request waits. Each failure doubles it."""
RETRY_CAP_S = 8.0
"""The most that any retry of a request waits."""
RETRY_AFTER_CAP_S = 60.0
"""The longest Retry-After that is obeyed."""
CONNECT_S = 5.0
"""Connecting to a server of HTTP."""
SILENCE_S = 30.0
"""A server of HTTP that sends nothing for this time is given up."""
RECEIVE_S = 5.0
"""One receive without TLS, which returns all bytes that came; a silent server is noticed so much later."""
BODY_S = 120.0
"""One head or body: 8 MiB take this at 70 KB/s. A slower read is tried on another connection."""
DRIVER_CALL_S = 120.0
"""One call of a driver of fsspec; a read of 8 MiB takes this at 70 KB/s."""
DRIVER_LIST_S = 900.0
"""A whole listing of a driver of fsspec, which is one call."""
HUNG_S = 30.0
"""A read of a mount without progress. A disk spins up in 10 s; retries, not one call, wait for a server's reboot."""
OPEN_S = 60.0
"""Foreign code that opens a source. A call that hangs is made again after twice the time."""
HELPER_S = 60.0
"""One call of the chain of AWS credentials: a helper or an identity service may be slow."""
RENEW_S = 5.0
"""The least time between two renewals of credentials: a metadata service that fails needs rest."""

# Fills and openings

FILL_TRIES = 4
"""Tries of a fill before its readers get the error, on top of the retries of its requests."""
FILL_RETRY_FIRST_S = 0.1
"""The wait after the first failed fill: about a round trip to an object store. Each failure doubles it."""
FILL_RETRY_CAP_S = 10.0
"""The longest wait between two tries of a fill: readers wait for tens of seconds."""
FILL_S = 600.0
"""A fill that a builder waits for. The fill's own error comes first."""
PREPARE_STALL_S = 10.0
"""A process that prepares an extent and makes no progress: another process gets the extent. A sample takes milliseconds."""
BUILD_TRIES = 4
"""Builders that one build may kill; a builder may also be killed for other reasons."""
STALE_AFTER_S = 20.0
"""An opening without an answer of the source opens the last version after this time."""
LOOKUP_S = 10.0
"""A lookup of a path. A busy server takes a second, one that reboots takes minutes."""
VERIFY_TRIES = 3
"""Tries of a check of cached bytes. Bytes that are wrong after so many refills are not the disk's fault."""

# Other nodes

GREET_S = 10.0
"""Between two greetings of a member that answers."""
GREET_RETRY_FIRST_S = 1.0
"""The pause after a greeting that failed. Each failure doubles it."""
GREET_RETRY_CAP_S = 30.0
"""The longest pause between two greetings, also of an address that neither answers nor fails."""
PEER_CALL_S = 2.0
"""One control call to a node. A node that is later is away, and its stand-in is asked."""
PEER_RECONNECT_S = 5.0
"""The longest pause between two connections for such calls."""
LOCATE_S = 15.0
"""The agent's answer where an extent is. Later, the fill reads from the source."""
PEER_SILENT_S = 3.0
"""A node that sends nothing of a block is taken for dead: it says each second that it waits."""
FILL_LATE_S = 3.0
"""A fill is late after this, or after three times what fills of its size take: then another place is asked."""
PEER_LEAST_RATE = 65536
"""Bytes a second. A node that sends less for `FILL_LATE_S` is late, too."""
FILL_LEASE_S = 60.0
"""A fill for the cluster without progress is given to another node, unless a node that follows it found it late."""

# Readers and their daemon

ACQUIRE_S = 300.0
"""One read, a daemon's restart included (`CACHESVC_TIMEOUT_S`): a cold extent behind a throttled source takes minutes."""
ROOM_S = 120.0
"""A read that waits for room: a RAM tier that shrank grows again a minute after trainers released memory."""
ROOM_PAUSE_S = 0.02
"""Between two looks for room, which the daemon does not announce."""
REQUIRE_S = 5.0
"""The wait of `CACHESVC=require` for a daemon: a node may start both at once."""
PROBE_FIRST_S = 0.1
"""Between two looks for a daemon that is gone, at first."""
PROBE_CAP_S = 1.0
"""The longest pause between two such looks: a daemon that is back should be used soon."""
UPGRADE_WAIT_S = 10.0
"""A daemon that replaces another. After it, data is read around the daemon."""
UPGRADE_S = 120.0
"""An upgrade: the new daemon starts, the old one ends its fills, disks are opened."""
HELLO_S = 30.0
"""The answer to a greeting: a daemon that restarted loads the catalog first."""
SEND_S = 30.0
"""A message that a stopped daemon does not take; it counts as gone."""
CONTROL_CALL_S = 30.0
"""One control call."""
CONTROL_RETRY_S = 60.0
"""All tries of a control call, while one daemon replaces another or has no free place."""
BUSY_PAUSE_S = 0.5
"""Between two tries of a control call where this user has too many under way."""
FOOTER_S = 30.0
"""The checksums of a file that is granted before it is committed."""

# Ranks of a job

AGREE_S = 300.0
"""The other ranks' first batch: models load from a slow disk minutes apart."""
PEER_FAILURE_S = 30.0
"""A rank without a sign of life, while others wait for it (`peer_failure_s`)."""
