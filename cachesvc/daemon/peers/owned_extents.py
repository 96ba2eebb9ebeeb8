"""This node as an owner: answers from its directory where extents are, and has its daemon fetch what it is to keep."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE, Answer, ExtentDirectory
from cachesvc.core.placement.view import View

RECENT_S = 60.0
"""A directory does not know all holders for this time after its start or a change of owners: they announce their extents
within it."""


@dataclass(frozen=True, slots=True)
class Question:
    """An extent, and places that are not to be named to the asking node: those that failed to give it, those that were
    late, and those from which the node reads nothing now. SOURCE among them: the node does not read the source."""

    extent: ExtentId
    failed: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def without_source(self) -> bool:
        """The asking node does not read the source."""
        return SOURCE in (*self.failed, *self.late, *self.left_out)


class Keep(Protocol):
    """Asks this node's daemon to fetch extents, and returns those that it has or fetches: now or `later`; for a node that
    is `without_source` also those that it does not own."""

    def __call__(
        self, extents: list[ExtentId], later: bool, /, *, without_source: bool = False
    ) -> set[ExtentId]: ...


class OwnedExtents:
    """Safe from any thread."""

    def __init__(self, me: str, keep: Keep) -> None:
        self._me = me
        self._keep = keep
        self._directory = ExtentDirectory(keeper=me)
        self._lock = threading.Lock()
        self._away: frozenset[str] = frozenset()
        self._upstream: dict[ExtentId, str] = {}
        """The node from which this node fills an extent, by the answer of any directory."""
        self._without_source: set[ExtentId] = set()
        """Extents that this node fills without reading the source: no other node is to read them from here, since it may be
        the one that helps."""
        self._changed_at = time.monotonic()
        self._placement: object = None
        self.lookups = 0
        self.redirects = 0

    @property
    def recent(self) -> bool:
        """True if holders may be unknown still."""
        return time.monotonic() - self._changed_at < RECENT_S

    def view_changed(self, view: View) -> None:
        """Take another view: nodes that left are forgotten."""
        names = {member.name for member in view.members}
        with self._lock:
            self._away = view.away
            if view.placement() == self._placement:
                return
            self._placement, self._changed_at = view.placement(), time.monotonic()
            for node in self._directory.nodes() - names - {self._me}:
                self._directory.forget(node)

    def located(self, extent: ExtentId, node: str) -> None:
        """Note where this node was told to read an extent that it fills."""
        with self._lock:
            self._upstream[extent] = node

    def find(self, asker: str, questions: Sequence[Question]) -> list[Answer]:
        """Tell a node where to read extents, and note it as filling them."""
        unknown = [] if asker == self._me else self._unknown(questions)
        kept = self._keep(unknown, False) if unknown else set()
        now = time.monotonic()
        with self._lock:
            self.lookups += len(questions)
            if asker == self._me:
                self._without_source.update(each.extent for each in questions if each.without_source)
            for each in questions:
                # A node that failed has no copy any more, or does not answer: it announces what it holds again.
                for node in each.failed:
                    self._directory.dropped(node, [each.extent])
            self._note_kept(kept, now)
            answers = [self._answer(asker, each, now) for each in questions]
        stuck = [
            each for each, found in zip(questions, answers) if found.node == SOURCE and each.without_source
        ]
        if stuck:
            helped = self._help(asker, stuck)
            answers = [helped.get(each.extent, found) for each, found in zip(questions, answers)]
        with self._lock:
            self.redirects += sum(answer.node != SOURCE for answer in answers)
        return answers

    def _help(self, asker: str, questions: Sequence[Question]) -> dict[ExtentId, Answer]:
        """Answer a node that is to read the source and does not: have this node's daemon read it. The node is not noted as
        filling the extents, before the daemon asks where to read them: others would wait for it."""
        with self._lock:
            self._directory.dropped(asker, [each.extent for each in questions])
            extents = [each.extent for each in questions if each.extent not in self._without_source]
        kept = self._keep(extents, False, without_source=True) if extents and asker != self._me else set()
        now = time.monotonic()
        with self._lock:
            self._note_kept(kept, now)
            return {each.extent: self._answer(asker, each, now) for each in questions if each.extent in kept}

    def _note_kept(self, kept: Iterable[ExtentId], now: float) -> None:
        for extent in kept:
            if not self._directory.wanted(extent, now):
                self._directory.lookup(self._me, extent, now)

    def _answer(self, asker: str, question: Question, now: float) -> Answer:
        left_out, behind = self._away.union(question.left_out), self._behind(question)
        return self._directory.lookup(
            asker, question.extent, now, question.failed, left_out, behind, question.late
        )

    def peek(self, asker: str, questions: Sequence[Question], keep: bool = False) -> list[Answer]:
        """Tell a node which others hold extents, and note nothing. `keep`: have the daemon fetch what none holds."""
        with self._lock:
            answers = [self._holder(asker, each) for each in questions]
        absent = [each.extent for each, answer in zip(questions, answers) if answer.node == SOURCE]
        coming = self._keep(absent, True) if keep and absent else set()
        return [
            Answer(self._me, True, 0) if each.extent in coming else answer
            for each, answer in zip(questions, answers)
        ]

    def report(
        self,
        node: str,
        filled: Iterable[ExtentId],
        dropped: Iterable[ExtentId],
        progressing: Iterable[tuple[ExtentId, int]],
        anew: bool,
    ) -> None:
        """Note what a node holds now, and holds no more, and which of its fills make progress."""
        now = time.monotonic()
        with self._lock:
            if node == self._me:
                for extent in (*filled, *dropped):
                    self._upstream.pop(extent, None)
                    self._without_source.discard(extent)
            self._directory.dropped(node, dropped)
            if anew:
                self._directory.announced_anew(node, filled, now)
            else:
                self._directory.filled(node, filled)
            self._directory.renew(node, progressing, now)

    def _behind(self, question: Question) -> tuple[str, ...]:
        """This node, where it may read from the asker.

        That is so after the asker's fill was interrupted or late, since other nodes may follow that fill, and where this
        directory does not know from which node this node fills the extent. An owner that is away now had told it.
        """
        upstream = self._upstream.get(question.extent, SOURCE)
        known = self._directory.upstream(self._me, question.extent) == upstream
        return (self._me,) if (question.failed or question.late) and not known else ()

    def _holder(self, asker: str, question: Question) -> Answer:
        left_out = {asker, *question.failed, *question.late, *question.left_out, *self._away}
        found = (node for node in self._directory.holders(question.extent) if node not in left_out)
        return Answer(next(found, SOURCE), False, 0)

    def _unknown(self, questions: Sequence[Question]) -> list[ExtentId]:
        now = time.monotonic()
        with self._lock:
            return [
                each.extent
                for each in questions
                if not (self._me in each.left_out or each.extent in self._without_source)
                and not self._directory.wanted(each.extent, now)
            ]
