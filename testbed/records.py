"""A bucket behind a counting proxy, and datasets of one record for each extent, whose digests are known."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from xxhash import xxh3_64_intdigest

from cachesvc.catalog.options import Options
from testbed.proxy import Counts, Proxy
from testbed.servers import SeaweedFS

OBJECT_BYTES = 16 << 20
"""The size of an object, apart from the last, where extents are smaller."""


@dataclass(frozen=True)
class Records:
    """A dataset of records as large as extents: record i is extent i. `digests[i]` is its XXH3."""

    uri: str
    extent_bytes: int
    digests: Sequence[int]

    @property
    def size_bytes(self) -> int:
        """The bytes of all records."""
        return self.extent_bytes * len(self.digests)

    @property
    def options(self) -> Options:
        """The options to open it with."""
        return Options(format="records", record_bytes=self.extent_bytes, extent_bytes=self.extent_bytes)


class Source:
    """A new bucket of a server, and a proxy before the server at a free port of `host`. Context manager."""

    def __init__(self, server: SeaweedFS, host: str) -> None:
        self._server = server
        self.proxy = Proxy(server.endpoint, host=host)
        self.bucket = f"cluster-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> Source:
        self._server.create_bucket(self.bucket)
        self.proxy.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.proxy.__exit__(kind, error, trace)

    @property
    def prefix(self) -> str:
        """The URI of the bucket."""
        return f"s3://{self.bucket}/"

    @property
    def credentials(self) -> dict[str, str]:
        """AWS_* variables of a client that reads through the proxy."""
        return self._server.env(self.proxy.endpoint)

    @property
    def counts(self) -> Counts:
        """The requests and bytes since the start or the last `reset`, without the uploads of `fill`."""
        return self.proxy.counts

    def reset(self) -> None:
        """Set the counts to zero."""
        self.proxy.reset()

    def gets(self) -> Counter[str]:
        """GETs of objects, by "path range"."""
        counts = {what: count for what, count in self.counts.by.items() if what.startswith("GET ")}
        return Counter({what[4:]: n for what, n in counts.items() if "list-type" not in what})

    def fill(self, extents: int, extent_bytes: int, name: str = "data", seed: int = 1) -> Records:
        """Upload a dataset of random records below `name`."""
        each = max(1, OBJECT_BYTES // extent_bytes)
        client = self._server.client()

        def put(first: int) -> list[int]:
            count = min(each, extents - first)
            body = np.random.default_rng([seed, first]).bytes(count * extent_bytes)
            client.put_object(Bucket=self.bucket, Key=f"{name}/{first:08d}.bin", Body=body)
            parts = (body[at : at + extent_bytes] for at in range(0, len(body), extent_bytes))
            return [xxh3_64_intdigest(part) for part in parts]

        with ThreadPoolExecutor(4) as pool:
            digests = [digest for part in pool.map(put, range(0, extents, each)) for digest in part]
        return Records(f"{self.prefix}{name}/", extent_bytes, digests)
