"""Epochs of a program that reads twice what the cache holds, through the S3 endpoint of a real daemon."""

from __future__ import annotations

import itertools
import os
import random
import uuid
from pathlib import Path

import pytest

from testbed.servers import Proxy, SeaweedFS
from tests.support import s3_endpoint

MIB = 1 << 20
OBJECTS = 64
OBJECT_BYTES = 4 * MIB


@pytest.mark.slow
def test_later_epochs_hit_nearly_half_with_half_of_the_data_in_the_cache(
    s3_server: SeaweedFS, proxy: Proxy, tmp_path: Path
) -> None:
    bucket = s3_server.create_bucket(f"scans-{uuid.uuid4().hex[:8]}")
    bodies = {f"data/{number:03d}.tar": os.urandom(OBJECT_BYTES) for number in range(OBJECTS)}
    for key, body in bodies.items():
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=body)
    options = ["--ram", f"{OBJECTS // 2 * 4}MiB", "--extent-bytes", "4MiB", "--allow", f"s3://{bucket}/data/"]
    chance = random.Random(3)
    with s3_endpoint.served(tmp_path, options, s3_server.env(proxy.endpoint)) as daemon:
        client = s3_endpoint.client_of(daemon)
        fetched = [proxy.counts.bytes]
        for _ in range(4):
            for key in chance.sample(sorted(bodies), OBJECTS):
                assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == bodies[key]
            fetched.append(proxy.counts.bytes)
    hits = [1 - (end - begin) / (OBJECTS * OBJECT_BYTES) for begin, end in itertools.pairwise(fetched)]
    assert hits[0] == pytest.approx(0, abs=0.05)
    assert min(hits[2:]) >= 0.4, hits
