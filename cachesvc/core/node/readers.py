"""Readers: their leases, their waits, and the queue of extents that readers wait for.

An extent with waiters is filling, queued here, or due for a retry. The queue is fair between jobs. An extent that several
jobs wait for is queued for each of them; it is filled once, when the first job is served, and costs the others no
place. The head of the queue starts when it has a slot and room. It waits while room is coming without a reader's doing,
and is refused when only readers could free room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.errors import NotFound
from cachesvc.core.lookahead.plans import Plans
from cachesvc.core.model import RAM, Counted, DatasetId, ExtentId, ReaderId
from cachesvc.core.node.status import ReaderStatus
from cachesvc.core.records.fair_queue import FairQueue
from cachesvc.core.records.residency import CacheEntry, Copy, Role
from cachesvc.core.tiering.budgets import answering
from cachesvc.core.tiering.copies import UNDECLARED, Copies
from cachesvc.core.tiering.fill_starts import FillStarts, Readiness
from cachesvc.core.tiering.policy import Requester

MAX_WAITS = 1024
"""Unanswered requests of one reader; the next is refused."""
ALL_USERS = None
"""The account in which an extent counts once for all users together: they map the same memory."""


class Hold(NamedTuple):
    """One reader's hold of one extent. `size_bytes` 0: it counts nothing, and only its release is expected."""

    size_bytes: int
    user: int


class PreRestartHolds:
    """Memory that readers map from before the daemon's restart: held bytes of each user, and of `ALL_USERS`."""

    def __init__(self) -> None:
        self.held_bytes: Counter[int | None] = Counter()
        self.sizes: dict[ExtentId, int] = {}
        """Sizes in bytes of the extents that some reader holds."""
        self._readers: Counter[tuple[int | None, ExtentId]] = Counter()

    def fits(self, extent: ExtentId, hold: Hold, most_bytes: int, budget_bytes: int) -> bool:
        """Return whether with this hold its user has no more than `most_bytes`, and all users no more than the budget."""
        return all(
            (account, extent) in self._readers or self.held_bytes[account] + hold.size_bytes <= limit_bytes
            for account, limit_bytes in ((hold.user, most_bytes), (ALL_USERS, budget_bytes))
        )

    def begin(self, extent: ExtentId, hold: Hold) -> None:
        """Count one more reader of an extent."""
        for account in (hold.user, ALL_USERS) if hold.size_bytes else ():
            if (account, extent) not in self._readers:
                self.held_bytes[account] += hold.size_bytes
            self._readers[account, extent] += 1
            self.sizes[extent] = hold.size_bytes

    def end(self, extent: ExtentId, hold: Hold) -> None:
        """Count one reader less."""
        for account in (hold.user, ALL_USERS) if hold.size_bytes else ():
            self._readers[account, extent] -= 1
            if not self._readers[account, extent]:
                del self._readers[account, extent]
                if account is ALL_USERS:
                    del self.sizes[extent]
                self.held_bytes[account] -= hold.size_bytes
                if not self.held_bytes[account]:
                    del self.held_bytes[account]


@dataclass(slots=True, eq=False)
class ReaderState:
    """A reader's leases, waits and holds."""

    job: int = 0
    """The job whose turn its demands take in the fair queue."""
    leases: dict[ExtentId, list[Copy]] = field(default_factory=dict)
    waiting: dict[ExtentId, int] = field(default_factory=dict)
    """Unanswered requests of each extent."""
    waiting_since: float = 0.0
    """When the first of the requests came that are unanswered since."""
    held: dict[ExtentId, Hold] = field(default_factory=dict)
    recalls: int = 0
    """Recalls sent since the reader's last release."""


class Readers:
    """Readers by connection. The queue holds an extent once for each job, so it is no longer than all waits together."""

    def __init__(self, copies: Copies, plans: Plans, starts: FillStarts) -> None:
        self._copies = copies
        self._plans = plans
        self._starts = starts
        self._policy = copies.policy
        self._context = copies.context
        self.readers: dict[ReaderId, ReaderState] = {}
        self.queue: FairQueue[CacheEntry] = FairQueue()
        self.prepared: OrderedDict[DatasetId, FairQueue[CacheEntry]] = OrderedDict()
        """Prepared extents that readers wait for, by dataset, since those of one wait for its preparers."""
        self.holds = PreRestartHolds()

    def demand(self, event: ev.Demanded) -> None:
        """Grant a resident extent in the same step; otherwise have it filled and answer later."""
        entry = self._copies.entry(event.extent)
        copy = entry.best() if entry else None
        if entry is not None and copy is not None:
            counted: Counted = "hits" if copy.ahead_of is None else "ahead"
            self._grant(event.reader, event.request, copy, counted, event.job)
        else:
            self._miss(event, entry)

    def _miss(self, event: ev.Demanded, entry: CacheEntry | None) -> None:
        if entry is None:
            if event.size_bytes <= 0:
                message = f"extent {event.extent.hex()} is of no open dataset: open the dataset again"
                fail = cmd.Fail(event.reader, event.request, event.extent, NotFound.code, message)
                self._context.emit(fail)
                return
            entry = self._copies.ensure_entry(event.extent, event.size_bytes)
        reader = self.readers.setdefault(event.reader, ReaderState())
        reader.job = event.job or reader.job or event.reader
        if not event.wait or sum(reader.waiting.values()) >= MAX_WAITS:
            self._copies.counts_of(entry, event.reader).refused += 1
            self._context.emit(cmd.Refuse(event.reader, event.request, event.extent))
            self._copies.forget(entry)
            return
        entry.waiters.append((event.reader, event.request))
        if not reader.waiting:
            reader.waiting_since = self._context.now
        reader.waiting[entry.id] = reader.waiting.get(entry.id, 0) + 1
        self._enqueue(entry, (reader.job,))

    def release(self, event: ev.Released) -> None:
        """End one lease of an extent, or the hold from before a restart. An extent that the reader does not have is
        ignored."""
        reader, extent = self.readers.get(event.reader), event.extent
        if reader is None:
            return
        reader.recalls = 0
        if extent in reader.held:
            self._end_hold(reader, extent)
            self._charge_holds()
        elif leases := reader.leases.get(extent):
            self._end_lease(leases.pop())
            if not leases:
                del reader.leases[extent]

    def not_granted(self, event: ev.NotGranted) -> None:
        """Take a grant back, then refuse the demand or handle it again."""
        grant, entry = event.grant, self._copies.entry(event.grant.extent)
        if grant.reader not in self.readers:
            return  # its connection has ended
        self.release(ev.Released(grant.reader, grant.extent))
        if entry is not None:
            counts = self._copies.counts_of(entry, grant.reader)
            counts.count(grant.counted, -1)
            self._policy.tiers[grant.tier].granted_bytes -= entry.size_bytes
            if not event.again:
                counts.refused += 1
                self._copies.note_sourced(entry)
        if event.again:
            self.demand(ev.Demanded(grant.reader, grant.request, grant.extent))
        else:
            self._context.emit(cmd.Refuse(grant.reader, grant.request, grant.extent))

    def recall(self, copy: Copy, wrong: bool = True) -> None:
        """Recall a copy from every reader that leases it, or holds its extent from before the restart. `wrong`: its bytes
        are; otherwise others need its room."""
        extent = copy.entry.id
        for number, reader in self.readers.items():
            if extent in reader.held or any(lease is copy for lease in reader.leases.get(extent, ())):
                reader.recalls += 1
                self._context.emit(cmd.Recall(number, extent, wrong))

    def recall_hold(self, extent: ExtentId) -> None:
        """Recall an extent from every reader that holds it from before the restart: others need its room."""
        for number, reader in self.readers.items():
            if extent in reader.held:
                self._context.emit(cmd.Recall(number, extent, wrong=False))

    def end_leases(self, copy: Copy) -> None:
        """End every lease of a copy. Its readers keep the file that they opened, even if it is unlinked."""
        extent = copy.entry.id
        for reader in self.readers.values():
            for lease in [lease for lease in reader.leases.get(extent, ()) if lease is copy]:
                reader.leases[extent].remove(lease)
                self._end_lease(lease)
            if not reader.leases.get(extent, True):
                del reader.leases[extent]

    def disconnect(self, event: ev.ReaderGone) -> None:
        """End all leases, waits and holds of a connection that has ended."""
        reader_id = event.reader
        reader = self.readers.pop(reader_id, None)
        if reader is None:
            return
        for extent, count in reader.waiting.items():
            entry = self._copies.entries[extent]
            self._copies.counts_of(entry, reader_id).misses += count
            entry.waiters = [waiter for waiter in entry.waiters if waiter[0] != reader_id]
            self._copies.forget(entry)
        for leases in reader.leases.values():
            for copy in leases:
                self._end_lease(copy)
        for extent in tuple(reader.held):
            self._end_hold(reader, extent)
        self._charge_holds()
        self._context.mark_changed()

    def hold(self, event: ev.HoldReported) -> None:
        """Count an extent that a reader holds from before the restart: as a lease where its copy is in RAM still. Otherwise
        a reader is believed only for a while after the start, and within limits, since it could take room without a
        lease. A hold that is not believed counts no bytes, and its release is expected all the same."""
        reader, extent = self.readers.setdefault(event.reader, ReaderState()), event.extent
        ram = self._policy.tiers.get(RAM)
        copy = self._copies.find(extent, ram) if ram and event.size_bytes else None
        if copy is not None and copy.usable:
            self._copies.lease(copy)
            reader.leases.setdefault(extent, []).append(copy)
            return
        hold = Hold(event.size_bytes, event.user)
        self._end_hold(reader, extent)
        if not self._believed(extent, hold, event.most_bytes):
            hold = Hold(0, event.user)
        reader.held[extent] = hold
        self.holds.begin(extent, hold)
        self._charge_holds()

    def status(self, reader: ReaderId) -> ReaderStatus:
        """The leases and waits of a reader; none of a reader that asked for nothing yet."""
        state = self.readers.get(reader)
        if state is None:
            return ReaderStatus()
        waiting = [self._copies.entries[extent] for extent in state.waiting]
        return ReaderStatus(
            leased_extents=len(state.leases) + len(state.held),
            filling=tuple(entry.id for entry in waiting if entry.filling()),
            retried=tuple(each.id for each in waiting if each.due_at is not None and not each.filling()),
            queued=tuple(each.id for each in waiting if each.due_at is None and not each.filling()),
            waiting_since=state.waiting_since if waiting else 0.0,
        )

    def held_bytes(self, reader: ReaderId, extent: ExtentId) -> int:
        """Bytes that are counted for an extent which a reader holds from before the restart."""
        state = self.readers.get(reader)
        hold = state.held.get(extent) if state else None
        return hold.size_bytes if hold else 0

    def _believed(self, extent: ExtentId, hold: Hold, most_bytes: int) -> bool:
        ram = self._policy.tiers.get(RAM)
        late = self._context.now - self._context.began > self._policy.settings.hold_s
        return not late and self.holds.fits(extent, hold, most_bytes, ram.budget_bytes if ram else 0)

    def _end_hold(self, reader: ReaderState, extent: ExtentId) -> None:
        hold = reader.held.pop(extent, None)
        if hold is not None:
            self.holds.end(extent, hold)

    def _charge_holds(self) -> None:
        """Charge what readers hold to the RAM budget."""
        ram, held_bytes = self._policy.tiers.get(RAM), self.holds.held_bytes[ALL_USERS]
        if ram and ram.held_bytes != held_bytes:
            ram.held_bytes = held_bytes
            self._policy.reserve.retune()
            self._context.mark_changed()

    def _end_lease(self, copy: Copy) -> None:
        self._copies.end_lease(copy)
        if copy.role is not Role.KEPT:
            self._context.mark_changed()

    def _grant(self, reader_id: ReaderId, request: int, copy: Copy, counted: Counted, job: int = 0) -> None:
        reader = self.readers.get(reader_id)
        if reader is None:
            reader = self.readers[reader_id] = ReaderState()
        reader.job = job or reader.job or reader_id
        self._copies.lease(copy, unplanned=not self._plans.count_of(reader.job))
        reader.leases.setdefault(copy.entry.id, []).append(copy)
        entry, stay = copy.entry, self._policy.stay(copy)
        copy.tier.granted_bytes += entry.size_bytes
        self._copies.counts_of(entry, reader_id).count(counted)
        self._context.emit(
            cmd.Grant(
                reader_id,
                request,
                entry.id,
                copy.tier.name,
                stay,
                entry.from_peer,
                counted,
                entry.learned_bytes,
            )
        )

    def fail_waiters(self, entry: CacheEntry, code: int, message: str) -> None:
        """Answer every waiter of an extent with `Fail`."""
        for reader, request in self._take_waiters(entry):
            self._copies.counts_of(entry, reader).misses += 1
            self._context.emit(cmd.Fail(reader, request, entry.id, code, message))

    def ensure_fill(self, entry: CacheEntry) -> None:
        """Queue an extent with waiters unless it is filling or due for a retry."""
        self._enqueue(entry, (self.readers[reader].job for reader, _ in entry.waiters))

    def _enqueue(self, entry: CacheEntry, jobs: Iterable[int]) -> None:
        self._context.mark_changed()
        if entry.filling() or entry.due_at is not None:
            return
        for job in jobs:
            if job not in entry.queued:
                entry.queued |= {job}
                self._queue_of(entry).append(job, entry)

    def _queue_of(self, entry: CacheEntry) -> FairQueue[CacheEntry]:
        if entry.made_from is None:
            return self.queue
        return self.prepared.setdefault(entry.datasets[0].id if entry.datasets else UNDECLARED, FairQueue())

    def _take_waiters(self, entry: CacheEntry) -> list[tuple[ReaderId, int]]:
        waiters, entry.waiters = entry.waiters, []
        for reader_id, _ in waiters:
            waiting = self.readers[reader_id].waiting
            waiting[entry.id] -= 1
            if not waiting[entry.id]:
                del waiting[entry.id]
        return waiters

    def answer_waiters(self, entry: CacheEntry) -> None:
        """Grant an extent to its waiters where it is usable; otherwise have it filled."""
        copy = entry.best()
        if copy is None:
            self.ensure_fill(entry)
            return
        for reader, request in self._take_waiters(entry):
            self._grant(reader, request, copy, "misses")

    def refuse(self, entry: CacheEntry) -> None:
        """Tell every waiter of an extent to read it elsewhere."""
        self._copies.note_sourced(entry)
        self._copies.note_short_of_room(entry)
        for reader, request in self._take_waiters(entry):
            self._copies.counts_of(entry, reader).refused += 1
            self._context.emit(cmd.Refuse(reader, request, entry.id))

    def feed(self) -> bool:
        """Start the fills that readers wait for, in turn; False when the head of the queue must wait."""
        for dataset, queue in tuple(self.prepared.items()):
            length = len(queue)
            self._serve(queue)
            if not queue:
                del self.prepared[dataset]
            elif len(queue) < length:
                self.prepared.move_to_end(dataset)
        return self._serve(self.queue)

    def _serve(self, queue: FairQueue[CacheEntry]) -> bool:
        while queue:
            job, entry = queue.first
            waits = entry.waiters and not entry.filling() and entry.best() is None
            if waits and not self._start(entry):
                return False
            entry.queued -= {job}
            if waits:
                queue.served()
            else:
                queue.drop()
            if entry.waiters and not entry.filling():
                self.answer_waiters(entry)
            self._copies.forget(entry)
        return True

    def _start(self, entry: CacheEntry) -> bool:
        """Start the fill of an extent, or refuse its waiters; False when a slot, a source extent or room is coming."""
        readiness = self._starts.readiness(entry)
        if readiness is not Readiness.NOW:
            if readiness is Readiness.NEVER:
                self.refuse(entry)
            return readiness is Readiness.NEVER
        planned = any(self._plans.count_of(self.readers[reader].job) for reader, _ in entry.waiters)
        requester = Requester.PLANNED_READER if planned else Requester.UNPLANNED_READER
        placement = self._starts.start(entry, requester)
        if placement is None:
            return True
        if placement.room_coming or self._room_is_coming() or self._starts.ends_without_readers(entry):
            return False
        self.refuse(entry)
        return True

    def _room_is_coming(self) -> bool:
        """Return whether bytes will be free, or evictable, without a reader's doing."""
        tiers = answering(self._policy.tiers)
        if any(tier.evicting_bytes for tier in tiers):
            return True
        filling = (copy for copy in self._copies.filling if copy.tier in tiers and not copy.entry.waiters)
        committing = (copy for tier in tiers for copy in tier.committing if not copy.leases)
        return any(copy.role is not Role.KEPT for group in (filling, committing) for copy in group)
