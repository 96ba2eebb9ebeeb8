"""`python -m bench peers`: measure this loader, the limits and seven other set-ups over the same data in one run.

Every measurement runs in its own process (`bench.peers`): ours and the limits in this virtual environment, the
others in `.venv-peers`. A peer that cannot run becomes a table row with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.peers import corpus
from bench.peers.peer import UNTUNED, Job, Kind
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from testbed.node import Daemon
from testbed.servers import ProxyProcess, SeaweedFS
from testbed.usage import anonymous_bytes, family

OURS, LIMIT = "cachesvc", "limit"
OTHERS = (
    "MosaicML Streaming",
    "litData",
    "WebDataset",
    "DataLoader, files",
    "DataLoader, memmap",
    UNTUNED,
    "DataLoader, LMDB",
)
PEERS_PYTHON = ".venv-peers/bin/python"
BUCKET = "peers"
CHILD_S = 120.0
DELAY_MS, RATE_MB = 20.0, 90.0
COLD_KIND: Kind = "blobs"
DECODED_KIND: Kind = "images"
DISK_KIND: Kind = "records"
DISK_RUN_S = 1.5
WORKERS = 2
OPTIONS: dict[Kind, Options] = {
    "records": Options(format="records", record_bytes=corpus.RECORD_BYTES),
    "tokens": Options(format="tokens", dtype="uint16", seq_len=corpus.SEQ_LEN),
    "varied": Options(format="webdataset"),
    "blobs": Options(format="webdataset"),
    "images": Options(format="webdataset"),
    "rows": Options(format="records", record_bytes=corpus.ROW_BYTES),
}
IN_PROCESS, IN_WORKERS, IN_THREADS = "0", f"{WORKERS}", f"{WORKERS} threads"
WORKERS_OF_KIND: dict[Kind, tuple[str, ...]] = {
    "varied": (IN_PROCESS,),
    "images": (IN_WORKERS, IN_THREADS),
}
"""Worker set-ups of the kinds that are not measured with all of them: images are decoded in workers only."""
PEERS_OF_KIND: dict[Kind, tuple[str, ...]] = {
    "rows": (OURS, LIMIT, "DataLoader, memmap", UNTUNED, "DataLoader, LMDB")
}
"""Peers of the kinds that are not measured with all of them: `rows` compares memory, so with the leanest only."""


@dataclass(frozen=True)
class Scale:
    """Size of a comparison. `counts`: samples of each kind; `runs`: timed runs; `seconds`: length of a timed run;
    `longer`: the same for kinds with slow batches, which need more; `disk_records`: those of the dataset that is four times
    as large as the RAM tier."""

    counts: dict[Kind, int]
    longer: dict[Kind, float]
    seconds: float = 0.6
    runs: int = 3
    thorough: bool = False
    disk_records: int = 0


FULL = Scale(
    {
        "records": 60_000,
        "varied": 40_000,
        "tokens": 50_000,
        "blobs": 2_000,
        "images": 1_280,
        "rows": 1_281_167,
    },
    {"images": 1.5},
    disk_records=350_000,
)
QUICK = Scale(
    {"records": 2_000, "varied": 2_000, "tokens": 2_000, "blobs": 200, "images": 160, "rows": 20_000},
    {},
    0.1,
    1,
    thorough=True,
    disk_records=4_000,
)


@dataclass
class Results:
    """Answer of each process, or {"error": line}. Keys of `warm` are "kind/peer/workers", those of the others the
    peer's name. By kind, `sizes` are dataset bytes and `shared_bytes` the memory of our daemon and its tier."""

    sizes: dict[str, int] = field(default_factory=dict)
    warm: dict[str, dict[str, Any]] = field(default_factory=dict)
    disk: dict[str, dict[str, Any]] = field(default_factory=dict)
    cold: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    shared_bytes: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> str:
        """JSON with every single run."""
        return json.dumps(asdict(self), indent=1)


class Bench:
    """One comparison in its own folder."""

    def __init__(self, root: Path, s3: SeaweedFS, scale: Scale, peers: Sequence[str] = OTHERS) -> None:
        self.root, self.s3, self.scale = root, s3, scale
        self.peers = (OURS, LIMIT, *peers)
        self.results = Results()
        self._failed: dict[str, str] = {}

    def run(self) -> Results:
        """Prepare the data, then take all measurements one after another."""
        self._prepare()
        for kind in corpus.KINDS:
            self._warm(kind)
        self._disk()
        for _ in range(self.scale.runs):
            for peer in self.peers:
                self.results.cold.setdefault(peer, []).append(self._cold(peer))
        return self.results

    # ---- the data

    def _prepare(self) -> None:
        """Write the corpus once, let every peer convert it, and upload what is read from S3."""
        raw = self.root / "corpus"
        corpus.write(raw, self.scale.counts)
        self.results.sizes = {kind: corpus.size_bytes(raw, kind) for kind in corpus.KINDS}
        self.s3.create_bucket(BUCKET)
        for peer in self.peers:
            jobs = [self._job(peer, kind) for kind in corpus.KINDS if peer in self._peers_of(kind)]
            for job in jobs:
                Path(job.folder).mkdir(parents=True)
            answer = self._child("write", peer, *jobs)
            if "error" in answer:
                self._failed[peer] = answer["error"]
                continue
            for job in jobs:
                if peer == OURS or job.kind == COLD_KIND:
                    key = self._prefix(peer, job.kind).removeprefix(f"s3://{BUCKET}/")
                    self.s3.upload(Path(job.folder), BUCKET, key)

    def _peers_of(self, kind: Kind) -> tuple[str, ...]:
        return tuple(peer for peer in self.peers if peer in PEERS_OF_KIND.get(kind, self.peers))

    def _prefix(self, peer: str, kind: Kind) -> str:
        return f"s3://{BUCKET}/{peer.replace(' ', '').replace(',', '-')}/{kind}/"

    def _job(self, peer: str, kind: Kind) -> Job:
        return Job(
            peer,
            kind,
            str(self.root / "corpus"),
            str(self.root / peer.replace(" ", "") / kind),
            self.scale.counts[kind],
            corpus.BATCH[kind],
            seconds=self.scale.longer.get(kind, self.scale.seconds),
            runs=self.scale.runs,
            thorough=self.scale.thorough,
        )

    # ---- the measurements

    def _warm(self, kind: Kind) -> None:
        """Measure ours through a daemon that holds the kind, the others from local files."""
        options = ["--ram", "4GiB", "--allow", f"s3://{BUCKET}/"]
        with Daemon(self.root / f"node-{kind}", options, self.s3.env()) as daemon:
            tiers = _prefetch(daemon, self._prefix(OURS, kind), kind)
            pids = tuple(family(daemon.pid))
            self.results.shared_bytes[kind] = tiers + anonymous_bytes(pids)
            ours = replace(self._job(OURS, kind), remote=self._prefix(OURS, kind), watched=pids)
            for peer in self._peers_of(kind):
                job = ours if peer == OURS else self._job(peer, kind)
                for name, one in _variants(job).items():
                    key = f"{kind}/{peer}/{name}"
                    self.results.warm[key] = self._child("warm", peer, one, env=daemon.env)

    def _disk(self) -> None:
        """Measure ours through a daemon whose RAM tier holds a quarter of the data and whose NVMe tier all of it, and the
        others from local files."""
        root = self.root / "disk"
        corpus.write(root / "corpus", {DISK_KIND: self.scale.disk_records})
        (root / "tier").mkdir()
        ram_bytes = max(16 << 20, corpus.size_bytes(root / "corpus", DISK_KIND) // 4)
        tiers = ["--ram", str(ram_bytes), "--nvme", f"{root}/tier=8GiB"]
        options = [*tiers, "--extent-bytes", f"{ram_bytes >> 24}MiB", "--allow", f"{root}/"]
        with Daemon(root / "node", options) as daemon:
            for peer in self.peers:
                if peer != "DataLoader, files":  # it would write a file for each record
                    self.results.disk[peer] = self._from_disk(peer, root, daemon)

    def _from_disk(self, peer: str, root: Path, daemon: Daemon) -> dict[str, Any]:
        job = replace(
            self._job(peer, DISK_KIND),
            corpus=str(root / "corpus"),
            folder=str(root / peer.replace(" ", "")),
            samples=self.scale.disk_records,
            disk=str(root),
            seconds=DISK_RUN_S if self.scale.runs > 1 else self.scale.seconds,
        )
        Path(job.folder).mkdir()
        answers = [self._child("write", peer, job)]
        if peer == OURS:
            _prefetch(daemon, job.folder, DISK_KIND)
            job = replace(job, remote=job.folder, watched=tuple(family(daemon.pid)))
        answers.append(self._child("warm", peer, job, env=daemon.env))
        answers += [self._child("dropped", peer, job, env=daemon.env) for _ in range(job.runs)]
        failed = next((each for each in answers if "error" in each), None)
        return failed or {"warm": answers[1]["runs"], "cold": [each["run"] for each in answers[2:]]}

    def _cold(self, peer: str) -> dict[str, Any]:
        """Measure one epoch through the slow network with nothing cached, and the first one of a second job."""
        with (
            ProxyProcess(
                self.s3.endpoint.removeprefix("http://"), delay_ms=DELAY_MS, rate_mb=RATE_MB
            ) as proxy,
            tempfile.TemporaryDirectory(dir="/dev/shm") as cache,
        ):
            job = replace(
                self._job(peer, COLD_KIND),
                remote=self._prefix(peer, COLD_KIND),
                cache=cache,
                endpoint=proxy.endpoint,
            )
            env = self.s3.env(proxy.endpoint)
            with ExitStack() as node:
                if peer == OURS:
                    options = ["--ram", "4GiB", "--allow", f"s3://{BUCKET}/"]
                    env = node.enter_context(Daemon(Path(cache, "node"), options, env)).env
                answer = self._child("cold", peer, job, env=env)
                answer["source_bytes"] = proxy.counts().bytes
                second = self._child("cold", peer, job, env=env)
        return answer | {"second_s": second.get("epoch_s", float("nan"))}

    def _child(
        self, mode: str, peer: str, *jobs: Job, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run one measuring process; return its last line, or {"error": reason}."""
        if peer in self._failed:
            return {"error": self._failed[peer]}
        python = sys.executable if peer in (OURS, LIMIT) else PEERS_PYTHON
        if not shutil.which(python):
            return {"error": f"NOT INSTALLED: no {python}; run `make {Path(PEERS_PYTHON).parts[0]}/.ready`"}
        print(f"{mode} {peer} {jobs[-1].kind}, {jobs[-1].workers} workers", file=sys.stderr, flush=True)
        command = [python, "-W", "ignore", "-m", "bench.peers", mode, *(job.as_json() for job in jobs)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "CACHESVC": "require", **(env or {})},
                capture_output=True,
                text=True,
                timeout=CHILD_S,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"NO RESULT within {CHILD_S:.0f} s"}
        if done.returncode:
            named = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.M)
            return {"error": f"FAILED: {named[-1][:200] if named else f'exit code {done.returncode}'}"}
        return dict(json.loads(done.stdout.splitlines()[-1]))


def _prefetch(daemon: Daemon, source: str, kind: Kind) -> int:
    """Fill the daemon's tiers; return the bytes in them."""
    with Control(daemon.socket_dir) as control:
        opened = control.open_dataset([source], OPTIONS[kind])
        for _ in control.prefetch(opened.id):
            pass
        return sum(tier.used_bytes for tier in control.status().tiers)


def _variants(job: Job) -> dict[str, Job]:
    """Jobs of each worker set-up, by its name."""
    variants = {IN_PROCESS: job, IN_WORKERS: replace(job, workers=WORKERS)}
    if job.peer in (OURS, LIMIT):
        variants[IN_THREADS] = replace(job, workers=WORKERS, threads=True)
    if job.peer == LIMIT and job.kind != DECODED_KIND:
        return {IN_PROCESS: job}
    return {name: one for name, one in variants.items() if name in WORKERS_OF_KIND.get(job.kind, variants)}
