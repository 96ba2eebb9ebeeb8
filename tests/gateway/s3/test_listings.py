"""Documents of listings."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from cachesvc.gateway.s3 import listings


def test_buckets_come_in_pages() -> None:
    names, after = ["b-3", "a", "b-1", "b-2"], ""
    pages: list[list[str]] = []
    while not pages or after:
        page = listings.buckets(names, "b-", after, 2).decode()
        pages.append(re.findall("<Name>(.*?)</Name>", page))
        after = "".join(re.findall("<ContinuationToken>(.*?)</ContinuationToken>", page))
    assert pages == [["b-1", "b-2"], ["b-3"]]


def test_names_and_tokens_come_back_through_xml_as_they_were() -> None:
    odd = "a\r<b>&\u00e9"
    page = {"Contents": [{"Key": odd}], "IsTruncated": True, "NextContinuationToken": odd}
    document = ElementTree.fromstring(listings.listing("b", {"list-type": "2"}, page, lambda _: True))
    found = {each.tag.rpartition("}")[2]: each.text for each in document.iter()}
    assert (found["Key"], found["NextContinuationToken"]) == (odd, odd)
