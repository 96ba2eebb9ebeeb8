"""As whom S3 is asked: a client and credentials of the AWS chain, renewed when the server calls them expired."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import botocore.exceptions
from botocore.credentials import RefreshableCredentials

from cachesvc.core.errors import SourceUnavailable

log = logging.getLogger(__name__)
EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "InvalidToken",
    "InvalidAccessKeyId",
}
"""Codes of a 403 that newer credentials may mend; keys that were rotated are unknown, not expired."""
_FAILED = (botocore.exceptions.BotoCoreError, RuntimeError, OSError, ValueError)
"""What a chain that does not work raises; ValueError where a credential process prints no JSON."""
RENEW_S = 5.0
"""Between two tries to renew: all threads are refused at once, and a metadata service that fails needs no more."""


class Identity:
    """For many threads. `connect` resolves the chain anew: environment, files, role; (client, credentials)."""

    def __init__(
        self, connect: Callable[[], tuple[Any, Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect, self._clock = connect, clock
        self.client, self._credentials = connect()
        self._kept: Any = None
        self._again_at = 0.0
        self._lock = threading.Lock()

    def frozen(self) -> Any:
        """Keys to sign with; None is anonymous. While a refresh fails, those of before: they are valid for minutes
        beyond the moment when botocore wants new ones. Raises SourceUnavailable when there are none yet."""
        if self._credentials is None:
            return None
        if self._kept is not None and self._clock() < self._again_at:
            return self._kept
        try:
            self._kept = self._credentials.get_frozen_credentials()
        except _FAILED as error:
            said = " ".join(str(error).split())[:300]
            if self._kept is None:  # it may work soon
                raise SourceUnavailable(f"the AWS credentials could not be refreshed: {said}") from error
            log.warning(
                "the AWS credentials could not be refreshed; the old ones are used", extra={"error": said}
            )
            self._again_at = self._clock() + RENEW_S
        return self._kept

    def renewed(self, refused: Any) -> bool:
        """Whether there are other keys than those that the server refused; asks the chain when there are none."""
        with self._lock:
            if self._kept is not None and self._kept != refused:
                return True
            if self._clock() < self._again_at:
                return False
            self._again_at = self._clock() + RENEW_S
            try:
                client, credentials = self._connect()
                kept = credentials and credentials.get_frozen_credentials()
            except _FAILED as error:
                log.warning("the AWS credentials could not be renewed", extra={"error": str(error)[:300]})
                return False
            if kept in (None, refused):  # None: the chain holds none any more
                return False
            self.client, self._credentials, self._kept = client, credentials, kept
            self._again_at = 0.0
            log.info("the AWS credentials were renewed")
            return True

    @property
    def refreshable(self) -> bool:
        """Whether new credentials may come by themselves."""
        return isinstance(self._credentials, RefreshableCredentials)

    @property
    def missing(self) -> bool:
        """Whether the chain holds no credentials."""
        return self._credentials is None
