"""Chooses the membership by the option `--cluster`."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from urllib.parse import unquote, urlsplit

from cachesvc.cluster.addresses import join_address, split_address
from cachesvc.cluster.polled import MemberFile, Membership, PolledMembership, Registration, StaticList
from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput, install

FORMS = "static:HOSTS:PORT, file:///PATH, dns+srv://NAME or etcd://HOST:PORT/PREFIX"
ETCD_USER = "CACHESVC_ETCD_USER"
_NAME = re.compile(r"[^\s/]{1,253}")


def open_membership(spec: str, me: Registration, tls: Tls | None = None) -> Membership:
    """Make the membership that `spec` names; it does no IO before `watch`.

    `me` is what this node registers in etcd, and `tls` what `etcds://` needs. Raises InvalidInput for a spec that is none
    of the forms, for one whose package is not installed, and for a registration that etcd cannot take.
    """
    scheme, _, rest = spec.partition(":")
    if scheme == "static":
        return PolledMembership(spec, StaticList(rest))
    if scheme == "file":
        return PolledMembership(spec, MemberFile(_path(spec)))
    if scheme == "dns+srv" and rest.startswith("//"):
        _needs("dns", "dnspython", spec)
        from cachesvc.cluster.dns_service import ServiceRecords

        return PolledMembership(spec, ServiceRecords(spec))
    if scheme in ("etcd", "etcds") and rest.startswith("//"):
        return _open_etcd(spec, me, tls)
    raise InvalidInput(f"--cluster {spec!r} is not understood; write {FORMS}")


def _open_etcd(spec: str, me: Registration, tls: Tls | None) -> Membership:
    secure = spec.startswith("etcds:")
    hosts, prefix = _hosts_and_prefix(spec)
    split_address(me.address)
    if not _NAME.fullmatch(me.name):
        raise InvalidInput(f"{me.name!r} cannot be the name of a node; write one word without '/'")
    if secure and tls is None:
        raise InvalidInput("etcds:// needs --tls-cert, --tls-key and --tls-ca")
    _needs("aetcd", "aetcd", spec)
    from cachesvc.cluster.etcd import EtcdMembership

    return EtcdMembership(hosts, prefix, me, tls if secure else None, _user())


def _user() -> str:
    """Return NAME:PASSWORD from the environment: command lines and files of settings are seen by others."""
    user = os.environ.get(ETCD_USER, "")
    if user and not all(user.partition(":")):
        raise InvalidInput(f"${ETCD_USER} is not understood; write NAME:PASSWORD")
    return user


def _path(spec: str) -> str:
    parts = urlsplit(spec)
    path = unquote(parts.path)
    if parts.netloc or parts.query or parts.fragment or path[:1] != "/" or path[-1:] == "/" or "\0" in path:
        raise InvalidInput(f"--cluster {spec!r} names no file; write file:///PATH")
    return path


def _hosts_and_prefix(spec: str) -> tuple[list[str], str]:
    hosts, _, prefix = spec.partition("://")[2].partition("/")
    prefix = prefix.strip("/")
    if not hosts or not prefix or re.search(r"[\s?#]", prefix):
        raise InvalidInput(f"--cluster {spec!r} is not understood; write etcd://HOST:PORT,HOST:PORT/PREFIX")
    return [join_address(*split_address(host)) for host in hosts.split(",")], f"/{prefix}"


def _needs(module: str, package: str, spec: str) -> None:
    """Raise InvalidInput where a package of the extra `cluster` is not installed."""
    try:
        installed = find_spec(module) is not None
    except ValueError:  # sys.modules has None for it
        installed = False
    if not installed:
        raise InvalidInput(f"--cluster {spec} needs {package}: {install('cluster')}")
