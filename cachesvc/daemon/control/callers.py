"""The users of control calls, and what they may name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from cachesvc.client.caller_token import JOB_CHARACTERS, JOB_KEY
from cachesvc.core.errors import Busy, CacheError, InvalidInput, NotAllowed, OutOfSpace
from cachesvc.core.model import DatasetId
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.tenants import ANONYMOUS, Peer, Tenants, admits, token_of
from cachesvc.daemon.datasets import Datasets, ServedDataset, unknown
from cachesvc.daemon.events.event import SOURCE_ERRORS, Event, failed, record
from cachesvc.daemon.statuses import errors_as_statuses
from cachesvc.sources.near_names import allowed_hint

MAX_URIS = 100_000
REFUSALS = (NotAllowed, OutOfSpace, Busy)
"""Errors that are this daemon's answer to one caller: its allowlist, quotas and caps, and the source's permissions."""


class Callers:
    """Safe from any thread. `of_token` returns the user of the live grants connection with a token."""

    def __init__(self, tenants: Tenants, lookups: Lookups, of_token: Callable[[int], Peer | None]) -> None:
        self._tenants, self._lookups, self._of_token = tenants, lookups, of_token

    def of(self, context: grpc.ServicerContext) -> Peer | None:
        """Return the user of the grants connection that the call names; None where it names no live one."""
        token = token_of(context.invocation_metadata())
        return None if token is None else self._of_token(token)

    def uid(self, context: grpc.ServicerContext) -> int:
        """Return the caller's uid, or ANONYMOUS."""
        caller = self.of(context)
        return caller.uid if caller else ANONYMOUS

    @contextmanager
    def answering(self, context: grpc.ServicerContext, wanted: str = "") -> Iterator[None]:
        """End the call with a status where the body raises a typed error. Record a refusal, and where the caller `wanted` a
        URI an error of its source."""
        with errors_as_statuses(context):
            try:
                yield
            except CacheError as error:
                uri, dataset = (wanted, "") if "/" in wanted else ("", wanted)
                about = {**self._who(context), "uri": uri, "dataset": dataset}
                if isinstance(error, REFUSALS):
                    record(failed("refused", error, **about))
                elif uri and isinstance(error, SOURCE_ERRORS):
                    record(failed("source_failed", error, **about))
                raise

    def record(
        self, context: grpc.ServicerContext, kind: str, dataset: ServedDataset | None = None, **about: Any
    ) -> None:
        """Record what this caller did, with a dataset or with the daemon."""
        if dataset is not None:
            about |= {"uri": dataset.catalog.uri, "dataset": dataset.id}
        record(Event(kind, **self._who(context), **about))

    def _who(self, context: grpc.ServicerContext) -> dict[str, Any]:
        caller = self.of(context)
        if caller is None:
            return {}
        job = str(dict(context.invocation_metadata()).get(JOB_KEY, ""))[:JOB_CHARACTERS]
        return {"uid": caller.uid, "pid": caller.pid, "job": job}

    def prefixes(self, context: grpc.ServicerContext) -> list[str]:
        """Return the allowed prefixes that the caller may use."""
        return self._tenants.prefixes(self.of(context))

    def canonical(self, uris: Sequence[str], context: grpc.ServicerContext) -> list[str]:
        """Return the canonical URIs. Raises InvalidInput, NotAllowed, and what a lookup raises."""
        if not uris or len(uris) > MAX_URIS:
            raise InvalidInput(f"{len(uris)} URIs; give 1 to {MAX_URIS:,}")
        caller = self.of(context)
        return self._lookups.run(lambda: [self._tenants.check(uri, caller) for uri in uris], uris[0])

    def without_secret_names(self, message: str, context: grpc.ServicerContext) -> str:
        """Return an error's message without a name that this caller may not learn."""

        def allowed(uri: str) -> bool:
            with suppress(CacheError):
                return bool(self.canonical([uri], context))
            return False

        return allowed_hint(message, allowed)

    def dataset(self, datasets: Datasets, wanted: str, context: grpc.ServicerContext) -> ServedDataset:
        """Load a dataset. Raises NotFound where there is none, or the caller may not see it."""
        loaded = datasets.load(DatasetId(wanted)).result()
        if not admits(loaded.rules, self.of(context)):
            raise unknown(DatasetId(wanted))
        return loaded
