"""As whom S3 is asked, and whom it is believed to be: a client and credentials of the AWS chain, renewed when the
server calls them expired, and the authorities that may sign for the server. Where the environment makes no sense of
them, that is InvalidInput, and no OSError, which could pass for a disk's."""

from __future__ import annotations

import errno
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from botocore.httpsession import get_cert_path
from botocore.loaders import Loader, create_loader
from botocore.session import Session

from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, SourceUnavailable
from cachesvc.sources.s3 import errors as s3_errors
from cachesvc.sources.s3.errors import FAILED
from cachesvc.sources.s3.http import CONNECT_TIMEOUT_S, READ_TIMEOUT_S

log = logging.getLogger(__name__)
LIST_ATTEMPTS = 5
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_FIELDS = {
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "token",
}
_UNFIT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
RENEW_S = 5.0
"""Between two tries to renew: all threads are refused at once, and a metadata service that fails needs no more."""


class AccountIdentity:
    """For many threads. `connect` resolves the chain anew: environment, files, role; (client, credentials)."""

    def __init__(
        self, connect: Callable[[], tuple[Any, Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect, self._clock = connect, clock
        self.client, self._credentials = connect()
        self._kept: Any = None
        self._again_at = 0.0
        self._lock = threading.Lock()

    def signing_keys(self) -> Any:
        """Keys to sign with. While a refresh fails, those of before: they are valid for minutes
        beyond the moment when botocore wants new ones. Raises SourceUnavailable when there are none yet, InvalidInput
        when there are only such as no header can hold."""
        if self._kept is not None and self._clock() < self._again_at:
            return self._kept
        try:
            self._kept = check_keys(self._credentials.get_frozen_credentials())
        except FAILED as error:
            if self._kept is None and isinstance(error, InvalidInput):
                raise
            said = s3_errors.one_line(error)
            if self._kept is None:  # it may work soon
                raise SourceUnavailable(f"the AWS credentials could not be refreshed: {said}") from error
            log.warning(
                "the AWS credentials could not be refreshed; the old ones are used", extra={"error": said}
            )
            self._again_at = self._clock() + RENEW_S
        return self._kept

    def renew(self, refused: Any) -> bool:
        """Whether there are other keys than those that the server refused; asks the chain when there are none. Raises
        InvalidInput for keys that no header can hold."""
        with self._lock:
            if self._kept is not None and self._kept != refused:
                return True
            if self._clock() < self._again_at:
                return False
            self._again_at = self._clock() + RENEW_S
            try:
                client, credentials = self._connect()
                kept = credentials and check_keys(credentials.get_frozen_credentials())
            except InvalidInput:
                raise
            except FAILED as error:
                log.warning(
                    "the AWS credentials could not be renewed", extra={"error": s3_errors.one_line(error)}
                )
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


def sign_in(endpoint: str, region: str, clock: Callable[[], float]) -> AccountIdentity:
    """As the arguments say, and where they are empty the AWS environment. Raises NotAllowed without credentials,
    InvalidInput where the environment makes no sense, SourceUnavailable where this process is at a limit."""
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": LIST_ATTEMPTS},
        max_pool_connections=32,
    )

    def connect() -> tuple[Any, Any]:
        session = _session()
        client = session.client(
            "s3",
            endpoint_url=endpoint or None,
            region_name=region or session.region_name or "us-east-1",
            config=config,
        )
        return client, session.get_credentials()

    try:
        identity = AccountIdentity(connect, clock)
        if identity.missing:
            raise NotAllowed(f"no S3 credentials found: {s3_errors.CREDENTIALS}")
        if not identity.refreshable:  # else it may have to ask for them, and waits until they are needed
            identity.signing_keys()
    except CacheError:
        raise
    except FAILED as error:
        raise _unusable(error, faulty_setting(error)) from error
    if not _is_web(url := identity.client.meta.endpoint_url):
        raise InvalidInput(f"the S3 endpoint {url} is no http:// or https:// address; check AWS_ENDPOINT_URL")
    return identity


@cache
def service_data() -> Loader:
    """What botocore knows of services: read once a process, and in none that is forked from one which has. What a profile
    calls its data_path is left out: it may lie on a mount that hangs."""
    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _session() -> boto3.Session:
    """It resolves the chain anew, but has the service data of all: by itself it would read 15 MB in 0.1 s of CPU."""
    core = Session()
    session = boto3.Session(botocore_session=core)  # which adds a path to the data that it finds there
    core.register_component("data_loader", service_data())
    return session


def tls_context(url: str) -> ssl.SSLContext | None:
    """Whoever boto3 trusts to sign for the server of a URL; None where it speaks plainly. Raises InvalidInput for a file
    that holds no certificates, SourceUnavailable where this process is at a limit."""
    if urlsplit(url).scheme != "https":
        return None
    try:
        bundle = os.environ.get("AWS_CA_BUNDLE") or _session()._session.get_config_variable("ca_bundle")
        return ssl.create_default_context(cafile=bundle or get_cert_path(True))
    except FAILED as error:
        named = f"AWS_CA_BUNDLE (ca_bundle of the AWS profile), {bundle}, for a file of certificates in PEM"
        raise _unusable(error, named) from error


def _is_web(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


def check_keys(keys: Any) -> Any:
    """Of what would end a header, the HTTP library says all of that header. Raises InvalidInput, without what they are."""
    for name, field in _FIELDS.items():
        value = getattr(keys, field)
        if value is not None and (not isinstance(value, str) or _UNFIT.search(value)):
            raise InvalidInput(
                f"{name}, as the environment or the AWS profile has it, holds a line end or something else that no header"
                " can hold; set it anew without that"
            )
    return keys


def _unusable(error: Exception, setting: str) -> CacheError:
    said = s3_errors.one_line(error)
    if isinstance(error, OSError) and error.errno in _SHORT and not isinstance(error, ssl.SSLError):
        return SourceUnavailable(
            f"this process is at its limit: {said}; allow it more (LimitNOFILE=, ulimit)"
        )
    return InvalidInput(f"the AWS configuration does not work: {said}; check {setting}")


def faulty_setting(error: Exception) -> str:
    """What to check where credentials cannot be had: the variable that names the file which cannot be read or run."""
    file = getattr(error, "filename", None)
    found = [name for name, value in os.environ.items() if name.startswith("AWS_") and value == file]
    return (
        found[0] if found else "AWS_ENDPOINT_URL, AWS_PROFILE, and what that names: credential_process, files"
    )
