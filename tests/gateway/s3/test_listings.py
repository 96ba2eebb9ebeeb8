"""Documents of listings."""

from __future__ import annotations

import re

from cachesvc.gateway.s3 import listings


def test_buckets_come_in_pages() -> None:
    names, after = ["b-3", "a", "b-1", "b-2"], ""
    pages: list[list[str]] = []
    while not pages or after:
        page = listings.buckets(names, "b-", after, 2).decode()
        pages.append(re.findall("<Name>(.*?)</Name>", page))
        after = "".join(re.findall("<ContinuationToken>(.*?)</ContinuationToken>", page))
    assert pages == [["b-1", "b-2"], ["b-3"]]
