"""The part of a prefetch that other nodes hold: the extents that they own."""

from __future__ import annotations

import queue
import time

import grpc

from cachesvc.core.model import ExtentId
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.loop.waiting import CallWaits
from cachesvc.daemon.peers.messages import ExtentsSurveyed
from cachesvc.daemon.runner import Runner
from cachesvc.v1 import cachesvc_pb2 as pb

SURVEY_S = 1.0
"""The pause between surveys while owners fetch."""
ANSWER_S = 30.0


class ClusterProgress:
    """Counts what owners hold of one prefetch. Runs on the thread of its call."""

    def __init__(self, runner: Runner, job: int, dataset: ServedDataset, waiting: CallWaits) -> None:
        self._runner = runner
        self._job = job
        self._dataset = dataset
        self._waiting = waiting
        self._survey = ExtentsSurveyed(0)
        self._survey_at = 0.0

    def add(self, reply: pb.PrefetchReply, context: grpc.ServicerContext) -> None:
        """Move the extents that owners hold from `unfit_bytes` to `cluster_bytes`. While owners fetch some, the prefetch is
        not done."""
        link = self._runner.cluster
        if link is None or not reply.done or not reply.unfit_bytes:
            return
        extents = self._runner.node.claims.elsewhere(self._job)
        if extents and time.monotonic() >= self._survey_at:
            self._survey = self._ask(extents, context)
            self._survey_at = time.monotonic() + SURVEY_S
        held, coming = self._survey.held.intersection(extents), self._survey.coming.intersection(extents)
        held_bytes = self._dataset.bytes_of(held)
        reply.cluster_extents, reply.cluster_bytes = len(held), held_bytes
        reply.unfit_bytes = max(0, reply.unfit_bytes - held_bytes)
        reply.done = not coming

    def _ask(self, extents: list[ExtentId], context: grpc.ServicerContext) -> ExtentsSurveyed:
        link, answers = self._runner.cluster, queue.Queue[ExtentsSurveyed]()
        assert link is not None, "no cluster"
        link.survey(extents, answers.put)
        try:
            return self._waiting.next(answers, context, ANSWER_S)
        except queue.Empty:
            return ExtentsSurveyed(0)
