"""Members from the SRV records of a DNS name, such as that of a headless Service of Kubernetes."""

from __future__ import annotations

import ipaddress
import threading
from urllib.parse import parse_qs, urlsplit

import dns.exception
import dns.name
import dns.rdataclass
import dns.rdatatype
import dns.resolver

from cachesvc.cluster.addresses import join_address, split_address
from cachesvc.cluster.polled import LastList
from cachesvc.core.errors import InvalidInput
from cachesvc.core.placement.roster import Endpoint

MIN_WAIT_S, MAX_WAIT_S = 1.0, 30.0
"""Bounds of the time to live after which a name is resolved again; also of the pause after failures, which doubles."""
QUERY_S = 1.5
"""The timeout of a query, within the two seconds that `close` may take."""
DNS_PORT = 53
KINDS = (dns.rdatatype.A, dns.rdatatype.AAAA)
_Addresses = tuple[list[str], int]
"""The addresses of a host, and their time to live in seconds."""


class ServiceRecords:
    """The records of `dns+srv://NAME[?server=IP:PORT]`. Without a server /etc/resolv.conf names it, and its search domains
    hold too. SRV records have port and host; the host's A records are the members, or its AAAA records where it has no
    other. Raises InvalidInput."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._name = _service_name(parts.netloc, parts.path)
        self._server = _server(parts.query)
        self._pause_s = MIN_WAIT_S

    def ask(self, last: LastList, closed: threading.Event) -> float:
        try:
            members, ttl_s = self._resolve(closed)
        except dns.exception.DNSException as error:
            last.failed(str(error))
            return self._longer_pause()
        if closed.is_set():
            return 0.0
        last.found(members)
        if not members:
            return self._longer_pause()
        self._pause_s = MIN_WAIT_S
        return min(max(float(ttl_s), MIN_WAIT_S), MAX_WAIT_S)

    def _longer_pause(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_WAIT_S)
        return pause_s

    def _resolve(self, closed: threading.Event) -> tuple[frozenset[Endpoint], int]:
        """Return the members, and the least time to live in seconds of their records; incomplete once `closed` is set."""
        resolver = self._resolver()
        services = resolver.resolve(self._name, dns.rdatatype.SRV, search=True)
        ttls = [services.ttl]
        members: set[Endpoint] = set()
        for service in services:
            if closed.is_set():
                break
            addresses, ttl_s = _sent(services, service.target) or _asked(resolver, service.target)
            members |= {Endpoint(join_address(address, service.port)) for address in addresses}
            ttls.append(ttl_s)
        return frozenset(members), min(ttls)

    def _resolver(self) -> dns.resolver.Resolver:
        """Make a resolver, each time anew since /etc/resolv.conf may have changed."""
        resolver = dns.resolver.Resolver(configure=self._server is None)
        if self._server is not None:
            host, resolver.port = self._server
            resolver.nameservers = [host]
        resolver.lifetime = QUERY_S
        return resolver


def _sent(services: dns.resolver.Answer, host: dns.name.Name) -> _Addresses | None:
    """Return the addresses of a host that the server sent beside the SRV records, as that of Kubernetes does. One query for
    each host of each node would be too many for it."""
    response = services.response
    for kind in KINDS:
        records = response.get_rrset(response.additional, host, dns.rdataclass.IN, kind)
        if records:
            return [record.address for record in records], records.ttl
    return None


def _asked(resolver: dns.resolver.Resolver, host: dns.name.Name) -> _Addresses:
    """Ask for the addresses of a host; none where it has just gone."""
    for kind in KINDS:
        try:
            answer = resolver.resolve(host, kind, search=False)
        except dns.resolver.NoAnswer:
            continue
        except dns.resolver.NXDOMAIN:
            break
        return [record.address for record in answer], answer.ttl
    return [], int(MAX_WAIT_S)


def _service_name(name: str, path: str) -> dns.name.Name:
    try:
        if path in ("", "/") and name:
            return dns.name.from_text(name, origin=None)
    except dns.exception.DNSException:
        pass
    raise InvalidInput(f"{name + path!r} is not a DNS name; write dns+srv://_peers._tcp.NAME")


def _server(query: str) -> tuple[str, int] | None:
    given = parse_qs(query, keep_blank_values=True)
    if not given and not query:
        return None
    try:
        ((key, (text,)),) = given.items()
        host, port = split_address(text)
        ipaddress.ip_address(host)
    except ValueError:
        key = ""
    if key != "server":
        raise InvalidInput(
            f"{query!r} is not understood; write ?server=IP:PORT, such as ?server=10.0.0.10:{DNS_PORT}"
        )
    return host, port
