"""The exit codes, by the error tree.

| code | error | meaning |
|---|---|---|
| 0 | | done, and all of it |
| 1 | CacheError | anything else that went wrong; `doctor`: a check failed; `evict`: some of it stayed |
| 2 | InvalidInput | arguments, URI, format or budgets make no sense |
| 3 | NotAllowed | allowlist, socket owner or the source's credentials forbid it |
| 4 | NotFound | bucket, prefix, object or dataset does not exist, or holds nothing |
| 5 | CorruptData | bytes do not parse, or do not match their checksum |
| 6 | SourceChanged | the source no longer holds the version that was pinned or asked for |
| 7 | SourceUnavailable | the source throttles, times out or answers 5xx after all retries |
| 8 | OutOfSpace | it does not fit: budgets, a full disk (also the output's), or pinned and leased extents |
| 9 | TierFailed | a cache directory or the RAM tier answers with errors |
| 10 | DaemonUnavailable | no daemon answers at the socket |
| 11 | DeadlineExceeded | the answer did not come in time |
| 12 | StateMismatch | a job's state, ranks and arguments do not belong together |
| 13 | PeerRankFailed | another rank of this job failed to read its data |
| 14 | Busy | one user holds its share of the daemon's control calls |
| 15 | NotReady | a name does not resolve yet, a port is held, or a disk is not mounted, at the start of a daemon |
| 130 | | interrupted by Ctrl-C |

`cachesvc run` exits with its command's code (128 + n when signal n ended it).
"""

from __future__ import annotations

from cachesvc.core.errors import INTERRUPTED

HELP = "\b\nExit codes:\n" + "\n".join(
    f"  {code:>3}  {meaning}"
    for code, meaning in [
        (0, "done, and all of it"),
        (1, "another failure; doctor: a check failed; evict: some of it stayed"),
        (2, "invalid argument, URI, format or budget"),
        (3, "not allowed: allowlist, socket or credentials"),
        (4, "not found, or empty"),
        (5, "corrupt data"),
        (6, "the source changed"),
        (7, "the source is unavailable"),
        (8, "out of space: it does not fit"),
        (9, "a cache directory fails"),
        (10, "no daemon answers"),
        (11, "deadline exceeded"),
        (12, "state mismatch"),
        (13, "another rank failed"),
        (14, "the daemon is busy with calls of this user"),
        (15, "not ready: a daemon may start later"),
        (INTERRUPTED, "interrupted"),
    ]
)
"""The epilog of `cachesvc --help`; a test compares it and the table above with core/errors.py."""
