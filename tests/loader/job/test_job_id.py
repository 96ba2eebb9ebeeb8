"""The number that identifies a job, and the equal shares that a daemon gives to jobs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.core import wire
from cachesvc.core.wire import Message, Op
from loader.reading.connect import job_number
from testbed.node import Daemon
from testbed.servers import Proxy, SeaweedFS
from tests.support.greetings import greeted, tell
from tests.support.processes import stopped_fills
from tests.support.waiting import wait_until

EXTENT = 4096
EXTENTS = 50
SLURM = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environment", [SLURM, TORCHRUN, {}])
def test_ranks_of_one_job_have_one_number(environment: dict[str, str]) -> None:
    assert job_number(environment | {"RANK": "0"}) == job_number(environment | {"RANK": "7"})
    assert 0 < job_number(environment) < 1 << 64


def test_jobs_differ() -> None:
    environment = [SLURM, SLURM | {"SLURM_STEP_ID": "1"}, TORCHRUN, TORCHRUN | {"MASTER_PORT": "29501"}, {}]
    assert len({job_number(each) for each in environment}) == len(environment)


def test_without_a_launcher_a_process_group_is_a_job() -> None:
    mine = job_number({})

    def same_in_a_child(alone: bool) -> bool:
        child = os.fork()
        if not child:
            if alone:
                os.setsid()
            os._exit(job_number({}) == mine)
        return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert same_in_a_child(alone=False)
    assert not same_in_a_child(alone=True)


def test_a_job_of_four_readers_delays_another_by_its_share(
    tmp_path: Path, s3_server: SeaweedFS, bucket: str, s3_env: dict[str, str]
) -> None:
    """Two slots: four readers of one job request 40 extents, then a reader of another job five. These are granted as if
    each job had one reader."""
    s3_server.client().put_object(Bucket=bucket, Key="f/0.bin", Body=os.urandom(EXTENTS * EXTENT))
    options = [
        "--ram",
        "16MiB",
        "--allow",
        f"s3://{bucket}/",
        "--extent-bytes",
        str(EXTENT),
        "--fillers",
        "1",
    ]
    with Proxy(s3_server.endpoint.removeprefix("http://")) as proxy:
        credentials = {**s3_env, "AWS_ENDPOINT_URL": proxy.endpoint}
        with Daemon(tmp_path / "node", options, credentials) as daemon, Control(daemon.socket_dir) as control:
            uri = f"s3://{bucket}/f/"
            dataset = control.open_dataset([uri], Options(format="records", record_bytes=EXTENT)).id
            with stopped_fills(daemon):
                readers = [greeted(daemon, dataset, job) for job in (5, 5, 5, 5, 6)]
                for number, reader in enumerate(readers):
                    for extent in range(10 * number, 10 * number + 10)[: 5 if number == 4 else 10]:
                        tell(reader, Message(Op.GET, extent, extent))
                    tell(reader, Message(Op.CATALOG))
                    assert wire.decode(reader.recv(4096)).op is Op.CATALOG  # all before it has been taken
                proxy.reset()
            wait_until(lambda: control.list()[0].resident_extents == 45)
            for reader in readers:
                reader.close()
        # In the order in which they came.
        firsts = [re.search(r"bytes=(\d+)-", each) for each in proxy.counts.by]
        order = [int(found[1]) // EXTENT for found in firsts if found]
    assert sorted(order) == list(range(45))
    assert max(at for at, extent in enumerate(order) if extent >= 40) < 5 + 5 + 2 * 2 + 2
