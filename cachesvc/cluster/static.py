"""Members that the option itself lists."""

from __future__ import annotations

import threading

from cachesvc.cluster.host_lists import host_addresses
from cachesvc.cluster.last_list import LastList
from cachesvc.cluster.membership import Endpoint


class StaticList:
    """The hosts of `static:HOSTS`. Raises InvalidInput."""

    def __init__(self, hosts: str) -> None:
        self._members = frozenset(map(Endpoint, host_addresses(hosts)))

    def ask(self, last: LastList, closed: threading.Event) -> float:
        last.found(self._members)
        return threading.TIMEOUT_MAX
