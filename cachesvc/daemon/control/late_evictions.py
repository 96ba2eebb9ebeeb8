"""Evictions that members missed while they were away, for their return: in a file, at most `MOST`, for `KEPT_S`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from cachesvc.core.errors import CacheError, NotFound, OutOfSpace
from cachesvc.daemon.control.state_file import StateFile
from cachesvc.daemon.events.event import Event, record
from cachesvc.daemon.peers.relays import Relays
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
KEPT_S = 7 * 86_400.0
MOST = 1000
POLL_S = 2.0
"""How often the members are looked at while an eviction is kept."""
CALL_S = 30.0


class LateEvictions:
    """A thread evicts on each member once it answers. Safe from any thread."""

    def __init__(self, path: str, relays: Relays, now: Callable[[], float] = time.time) -> None:
        self._file, self._relays, self._now = StateFile(path), relays, now
        self._kept, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="late-evictions", daemon=True)

    def start(self) -> None:
        """Evict from now on, also what was kept before the daemon started."""
        self._kept.set()
        self._thread.start()

    def close(self) -> None:
        """End the thread. The next daemon goes on."""
        self._closed.set()
        self._kept.set()

    def keep(self, nodes: Iterable[str], datasets: Sequence[str]) -> float:
        """Keep evictions of datasets on members, given by name or address; return until when, in Unix time. Of more than
        `MOST` the oldest are dropped. Raises OutOfSpace where the file cannot be written."""
        until = self._now() + KEPT_S
        try:
            with self._file.changed() as stored:
                for key in (f"{node} {dataset}" for node in nodes for dataset in datasets):
                    stored.pop(key, None)
                    stored[key] = until
                for oldest in list(stored)[:-MOST]:
                    del stored[oldest]
        except OSError as error:
            raise OutOfSpace(f"{self._file.path} cannot be rewritten ({error.strerror})") from None
        self._kept.set()
        return until

    def _run(self) -> None:
        while not self._closed.is_set():
            self._kept.wait()
            try:
                if not self._evict_due():
                    self._kept.clear()
                    if self._evict_due():  # one that came meanwhile
                        self._kept.set()
            except OSError as error:
                log.error("kept evictions cannot be read", extra={"error": str(error)})
            self._closed.wait(POLL_S)

    def _evict_due(self) -> bool:
        """Evict on the members that answer; return whether some evictions are left."""
        stored = self._file.read()
        over = {
            each for each, until in stored.items() if not isinstance(until, float) or until <= self._now()
        }
        for each in stored.keys() - over:
            node, _, dataset = each.rpartition(" ")
            if self._relays.answers(node) and self._evict(node, dataset):
                over.add(each)
        if over:
            with self._file.changed() as left:
                for each in over:
                    left.pop(each, None)
        return len(over) < len(stored)

    def _evict(self, node: str, dataset: str) -> bool:
        """Evict a dataset on a member; return whether the member has answered, and is not to be asked again."""
        request = pb.EvictRequest(dataset=dataset).SerializeToString()
        try:
            (answer,) = self._relays.call(node, "Evict", request, True, CALL_S)
        except NotFound:  # it does not know the dataset
            return True
        except CacheError as error:
            about = {"node": node, "dataset": dataset, "error": str(error)}
            log.warning("a kept eviction failed, and is tried again", extra=about)
            return False
        evicted_bytes = pb.EvictReply.FromString(answer).evicted_bytes
        why = "it was away when this was asked for"
        record(Event("evicted", dataset=dataset, node=node, size_bytes=evicted_bytes, why=why))
        return True
