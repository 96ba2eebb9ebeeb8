"""`python -m bench.recognised.s3_tests CHECKOUT`: tests of ceph/s3-tests that read, at an endpoint and at its source.

`CHECKOUT` is a work tree of https://github.com/ceph/s3-tests with an environment `.venv` that has its requirements. What is
printed is the table of docs/s3-tests.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from bench.endpoint import endpoint_keys
from testbed.node import Daemon
from testbed.servers import SeaweedFS, free_ports

BUCKETS, MOST_BUCKETS = "s3t-", 600
SETTINGS = """[DEFAULT]
host = {host}
port = {port}
is_secure = False
ssl_verify = False
[fixtures]
bucket prefix = {buckets}
[s3 main]
display_name = M. Tester
user_id = testid
email = tester@example.com
api_name =
access_key = {key}
secret_key = {secret}
"""
OTHERS = """[{section}]
display_name = other
user_id = other
email = other@example.com
access_key = {key}
secret_key = {secret}
tenant = other
"""
SECTIONS = ("s3 alt", "s3 tenant", "iam", "iam root", "iam alt root")


def results(
    checkout: Path, endpoint: str, key: str, secret: str, environ: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Run the suite at an endpoint; return outcome and error of each test by its name."""
    at = urlsplit(endpoint)
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS.format(host=at.hostname, port=at.port, buckets=BUCKETS, key=key, secret=secret)
        settings += "".join(OTHERS.format(section=each, key=key, secret=secret) for each in SECTIONS)
        Path(folder, "s3tests.conf").write_text(settings)
        files = {"S3TEST_CONF": f"{folder}/s3tests.conf", "RESULTS": f"{folder}/results"}
        path = {"PYTHONPATH": f"{Path(__file__).parent}:{checkout}"}
        command = [".venv/bin/python", "-m", "pytest", "-q", "-p", "s3_tests_plugin", "--tb=no"]
        command += ["s3tests/functional/test_s3.py"]
        subprocess.run(command, cwd=checkout, env={**os.environ, **environ, **files, **path})
        rows = [json.loads(line) for line in Path(folder, "results").read_text().splitlines()]
    return {name: (outcome, error) for name, outcome, error in rows}


def main() -> int:
    """Print a row for each test; 1 where the source passes one that the endpoint fails."""
    checkout = Path(sys.argv[1]).resolve()
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder, SeaweedFS(Path(folder) / "s3") as s3:
        options = ["--ram", "256MiB", "--s3", f"127.0.0.1:{port}", "--s3-fresh", "0"]
        for number in range(MOST_BUCKETS):
            options += ["--s3-writes", f"s3://{BUCKETS}{number}/"]
        environ = {
            "SOURCE_ENDPOINT": s3.endpoint,
            "SOURCE_KEY": s3.access_key,
            "SOURCE_SECRET": s3.secret_key,
        }
        with Daemon(Path(folder) / "node", options, s3.env()) as daemon:
            keys = endpoint_keys(daemon)
            key, secret = keys["AccessKeyId"], keys["SecretAccessKey"]
            own = {**environ, "ENDPOINT_KEY": key, "ENDPOINT_TOKEN": keys["SessionToken"]}
            ours = results(checkout, keys["Endpoint"], key, secret, own)
        theirs = results(checkout, s3.endpoint, s3.access_key, s3.secret_key, environ)
    print("| test | endpoint | source | error |\n|---|---|---|---|")
    for name, (outcome, error) in ours.items():
        print(f"| `{name}` | {outcome} | {theirs[name][0]} | {error.replace('|', ' ')} |")
    return int(
        any(outcome == "failed" and theirs[name][0] == "passed" for name, (outcome, _) in ours.items())
    )


if __name__ == "__main__":
    sys.exit(main())
