"""Credentials and trust: a client and keys from the AWS credential chain, renewed when the server calls them expired, and
the authorities that may sign the server's certificate.

A wrong setting in the environment is InvalidInput, never an OSError, which could be taken for a disk's.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import RefreshWithMFAUnsupportedError
from botocore.httpsession import get_cert_path
from botocore.loaders import Loader, create_loader
from botocore.session import Session

from cachesvc.config import SourceSection, requester_pays
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, fault_of_node
from cachesvc.core.limits import CONNECT_S, HELPER_S, RENEW_S, SILENCE_S
from cachesvc.sources.limited_calls import SharedCalls
from cachesvc.sources.s3 import errors as s3_errors
from cachesvc.sources.s3.errors import FAILED

log = logging.getLogger(__name__)
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_FIELDS = {
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "token",
}
_INVALID = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_NO_SIGN = "AWS_NO_SIGN_REQUEST"
"""A variable as GDAL has it, since botocore has none."""


class AccountIdentity:
    """A boto3 client and the keys to sign with. Thread-safe. `connect(region)` resolves the chain anew (environment, files,
    role) and returns (client, credentials); "" is the region of the settings. Without credentials requests are not signed,
    as public buckets take them."""

    def __init__(
        self,
        connect: Callable[[str], tuple[Any, Any]],
        clock: Callable[[], float] = time.monotonic,
        helper_s: float = HELPER_S,
        headers: Mapping[str, str] | None = None,
        unsigned: bool = False,
    ) -> None:
        self._connect, self._clock, self._helper_s = connect, clock, helper_s
        self.client, self._credentials = connect("")
        self._elsewhere: dict[str, Any] = {}
        self.headers, self._unsigned = dict(headers or {}), unsigned
        """Headers of all requests."""
        self._keys: Any = None
        self._next_try_at = 0.0
        self._calls = SharedCalls[Any]("credentials")
        self._lock = threading.Lock()

    def signing_keys(self) -> Any:
        """Return the keys to sign with, None for none. While a refresh fails, these are the previous ones: they stay valid
        for minutes after botocore wants new ones. Raises SourceUnavailable when there are none yet, InvalidInput for keys
        that no header can hold."""
        if self._credentials is None or (self._keys is not None and self._clock() < self._next_try_at):
            return self._keys
        try:
            self._keys = check_keys(self._refreshed())
        except RefreshWithMFAUnsupportedError:  # botocore asks a second time in no other way
            _refuse_prompt("")
        except FAILED as error:
            if self._keys is None and isinstance(error, InvalidInput | NotAllowed):
                raise
            said = s3_errors.one_line(error)
            if self._keys is None:  # the next try may succeed
                raise fault_of_node(f"the AWS credentials could not be refreshed: {said}") from error
            log.warning(
                "the AWS credentials could not be refreshed; the old ones are used", extra={"error": said}
            )
            self._next_try_at = self._clock() + RENEW_S
        return self._keys

    def renew(self, refused: Any) -> bool:
        """Resolve the chain anew unless another thread has replaced the `refused` keys. Tell whether there are other keys
        now. Raises InvalidInput for keys that no header can hold."""
        with self._lock:
            if self._keys is not None and self._keys != refused:
                return True
            if self._clock() < self._next_try_at and "renew" not in self._calls:
                return False
            self._next_try_at = self._clock() + RENEW_S
        try:
            client, credentials, kept = self._limited("renew", self._anew)
        except (InvalidInput, NotAllowed):
            raise
        except FAILED as error:
            log.warning(
                "the AWS credentials could not be renewed", extra={"error": s3_errors.one_line(error)}
            )
            return False
        with self._lock:
            if kept in (None, refused):  # None: the chain has no keys any more
                return False
            self.client, self._credentials, self._keys = client, credentials, kept
            self._elsewhere.clear()
            self._next_try_at = 0.0
        log.info("the AWS credentials were renewed")
        return True

    def _refreshed(self) -> Any:
        """Return the keys, after a refresh if botocore wants one."""
        if isinstance(self._credentials, RefreshableCredentials) and self._credentials.refresh_needed():
            return self._limited("refresh", self._credentials.get_frozen_credentials)
        return self._credentials.get_frozen_credentials()

    def _anew(self) -> tuple[Any, Any, Any]:
        client, credentials = self._connect("")
        return client, credentials, credentials and check_keys(credentials.get_frozen_credentials())

    def _limited(self, kind: str, call: Callable[[], Any]) -> Any:
        """Return what a call of the credential chain returns. Threads that need the same kind of call share one. Raises
        what it raises, and SourceUnavailable that names a helper that hangs."""
        limit_s = self._helper_s
        running = self._calls.of(kind, limit_s, call)
        try:
            return running.result_within(
                limit_s, lambda: fault_of_node(f"{helper()} has not answered for {limit_s:.0f} s")
            )
        finally:
            self._calls.forget(kind, running)

    @property
    def refreshable(self) -> bool:
        """True if botocore refreshes these credentials by itself."""
        return isinstance(self._credentials, RefreshableCredentials)

    @property
    def anonymous(self) -> str:
        """The reason why requests are not signed, in words; "" if they are."""
        if self._credentials is not None:
            return ""
        if self._unsigned:
            return "its [[source]] says anonymous"
        return f"{_NO_SIGN} is set" if _wants_no_signature() else "no S3 credentials were found"

    def client_in(self, region: str) -> Any:
        """Return the client; for a `region`, one that resolves addresses there."""
        if not region:
            return self.client
        if region not in self._elsewhere:
            client, _ = self._limited(f"client in {region}", partial(self._connect, region))
            self._elsewhere[region] = client
        return self._elsewhere[region]


def sign_in(
    section: SourceSection, clock: Callable[[], float] = time.monotonic, helper_s: float = HELPER_S
) -> AccountIdentity:
    """Make a client and get credentials. The AWS environment and files stand in for empty fields of the section, and the
    instance's role for credentials. Raises InvalidInput for a wrong setting, SourceUnavailable when this process is at a
    limit."""
    payer = {"x-amz-request-payer": "requester"} if requester_pays(section) else {}
    plain = Config(
        connect_timeout=CONNECT_S,
        read_timeout=SILENCE_S,
        retries={"mode": "standard", "total_max_attempts": 1},  # `Resilient` retries
        max_pool_connections=32,
    )

    def connect(elsewhere: str) -> tuple[Any, Any]:
        session = _session(section.profile)
        credentials = None if section.anonymous or _wants_no_signature() else session.get_credentials()
        unsigned = Config(signature_version=UNSIGNED)
        client = session.client(
            "s3",
            endpoint_url=section.endpoint or None,
            region_name=elsewhere or section.region or session.region_name or "us-east-1",
            config=plain if credentials is not None else plain.merge(unsigned),
        )
        client.meta.events.register("before-parse.s3", s3_errors.refuse_page)
        if payer:
            client.meta.events.register("before-call.s3", lambda params, **_: params["headers"].update(payer))
        return client, credentials

    try:
        identity = AccountIdentity(connect, clock, helper_s, payer, section.anonymous)
        if not identity.refreshable:  # refreshable ones may need a request, so they wait for the first use
            identity.signing_keys()
    except CacheError:
        raise
    except FAILED as error:
        raise _wrong_setting(error, faulty_setting(error)) from error
    if not _is_web(url := identity.client.meta.endpoint_url):
        raise InvalidInput(f"the S3 endpoint {url} is no http:// or https:// address; check AWS_ENDPOINT_URL")
    return identity


def _wants_no_signature() -> bool:
    return os.environ.get(_NO_SIGN, "").lower() in ("yes", "true", "1")


@cache
def service_data() -> Loader:
    """Return botocore's data on services, read once by a process and inherited by its forks. A profile's data_path is left
    out: it may lie on a mount that hangs."""
    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _session(profile: str = "") -> boto3.Session:
    """Make a session that resolves the chain anew and shares the service data: loading it would cost 15 MB and 0.1 s."""
    core = Session(profile=profile or None)
    core.get_component("credential_provider").get_provider("assume-role")._prompter = _refuse_prompt
    session = boto3.Session(botocore_session=core)  # adds a path to the loader that it finds
    core.register_component("data_loader", service_data())
    return session


def _refuse_prompt(_: str) -> str:
    """Raise NotAllowed where botocore would ask a person for a code: a daemon has none, and a job has many processes."""
    raise NotAllowed(
        f"the AWS profile {_profile()} wants a code of MFA, which nobody can type here: get keys of a session (aws sts"
        " get-session-token, aws sso login) and name a profile that has them, or give the node a role"
    )


def helper(profile: str = "") -> str:
    """Return the name of what gives the credentials of a profile, by default the environment's: the program of its
    credential_process, if it has one. Its arguments may be secret."""
    command = ""
    with suppress(*FAILED):
        command = _session(profile)._session.get_scoped_config().get("credential_process", "")
    if words := command.split():
        return f"the credential_process {words[0]} of the AWS profile {profile or _profile()}"
    return f"the AWS credential chain of the profile {profile or _profile()}"


def _profile() -> str:
    return os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"


def tls_context(url: str) -> ssl.SSLContext | None:
    """Return the TLS context with the authorities that boto3 trusts; None for a plain http:// URL. Raises InvalidInput
    for a file without certificates, SourceUnavailable when this process is at a limit."""
    if urlsplit(url).scheme != "https":
        return None
    try:
        bundle = os.environ.get("AWS_CA_BUNDLE") or _session()._session.get_config_variable("ca_bundle")
        bundle = bundle or os.environ.get("REQUESTS_CA_BUNDLE")  # as botocore does for LIST and HEAD
        return ssl.create_default_context(cafile=bundle or get_cert_path(True))
    except FAILED as error:
        named = f"AWS_CA_BUNDLE (or ca_bundle of the profile, REQUESTS_CA_BUNDLE), {bundle}, for a file of PEM certificates"
        raise _wrong_setting(error, named) from error


def _is_web(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


def check_keys(keys: Any) -> Any:
    """Check that keys fit in a header: an HTTP library would quote an invalid header in its error. Raises InvalidInput that
    does not contain them."""
    for name, field in _FIELDS.items():
        value = getattr(keys, field)
        if value is not None and (not isinstance(value, str) or _INVALID.search(value)):
            raise InvalidInput(
                f"{name}, as the environment or the AWS profile has it, holds a line end or something else that no header"
                " can hold; set it anew without that"
            )
    return keys


def _wrong_setting(error: Exception, setting: str) -> CacheError:
    said = s3_errors.one_line(error)
    if isinstance(error, OSError) and error.errno in _LIMITS and not isinstance(error, ssl.SSLError):
        return fault_of_node(f"this process is at its limit: {said}; allow it more (LimitNOFILE=, ulimit)")
    return InvalidInput(f"the AWS configuration does not work: {said}; check {setting}")


def faulty_setting(error: Exception) -> str:
    """Return the setting to check when there are no credentials: the variable that names the file of the error."""
    file = getattr(error, "filename", None)
    found = [name for name, value in os.environ.items() if name.startswith("AWS_") and value == file]
    return (
        found[0] if found else "AWS_ENDPOINT_URL, AWS_PROFILE, and what that names: credential_process, files"
    )
