"""The places that the endpoint asks: one for each section of the settings, and one for all other buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachesvc.config import SourceSection, section_of
from cachesvc.gateway.s3.errors import S3Error
from cachesvc.sources.s3.s3 import ALL, S3Source, open_s3
from cachesvc.sources.s3.signing import RequestSigner


@dataclass(frozen=True, slots=True)
class Account:
    """An endpoint with credentials of the node."""

    source: S3Source
    signer: RequestSigner


class Accounts:
    """Accounts by URI. Thread-safe. Raises as `open_s3`."""

    def __init__(self, sections: Sequence[SourceSection]) -> None:
        self._sections = sections
        self._opened = {ALL: _open(ALL)}

    def of(self, uri: str) -> Account:
        """Return the account of a URI, which is opened at first: that may wait for a server. Raises S3Error for what is
        read from a folder, and as `open_s3`."""
        section = section_of(uri, self._sections)
        section = section if section in self._sections else ALL
        if section.path:
            raise S3Error(
                "NotImplemented", f"what lies below {section.prefix} is read from a folder here, not by S3"
            )
        if section not in self._opened:  # two threads may open it side by side; one of them keeps it
            self._opened.setdefault(section, _open(section))
        return self._opened[section]


def _open(section: SourceSection) -> Account:
    source = open_s3(section)
    return Account(source, RequestSigner(source))
