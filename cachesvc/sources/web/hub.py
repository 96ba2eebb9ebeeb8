"""The source of datasets on Hugging Face's hub: `hf://datasets/OWNER/NAME[@REVISION]/path`.

A version is the commit that a revision named when it was listed, and the object's own id: the SHA-256 of an LFS or Xet
object, the git id of a small file. Reads ask for that commit, so nothing changes under a job. The hub redirects a read of a
large object to a signed URL on its storage, which is used again until it is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

from cachesvc.core.errors import (
    CorruptData,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.http import HttpConnection, Response
from cachesvc.sources.s3.responses import RepeatedFaults, check_no_page
from cachesvc.sources.source import Checker, OnReceived, Send, ignore_received, send_once
from cachesvc.sources.stated_hashes import hub_sha256
from cachesvc.sources.web.client import REDIRECTS, WebClient, receive, redirected, refusal

_URI = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", re.DOTALL)
_SHA = re.compile(r"[0-9a-f]{40}")
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
_MAX_PAGE_BYTES = 16 << 20
_MAX_PAGES = 10_000
_MAX_SIGNED = 100_000
_LOGIN = "set HF_TOKEN, and accept the dataset's conditions on its page"


class HubSource:
    """A `Source` of one hub. `token`: "" reads public datasets alone. It is sent to `endpoint` and nowhere else."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = WebClient()
        self.close = self._client.close
        self._signed: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        self._repeated = RepeatedFaults()

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Yield every file below a folder in the order of their paths, or the file of exactly that name."""
        return self.list_by(prefix, send_once)

    def list_by(self, prefix: str, send: Send) -> Iterator[ObjectVersion]:
        """List with `send` for each request. See `Paged`."""
        repository, revision, path = _split(prefix)
        sha = send(lambda: self._commit(repository, revision, prefix))
        root = prefix.rstrip("/").removesuffix(path.rstrip("/")).rstrip("/")
        found = dict(self._files(send, repository, sha, path.strip("/"), prefix))
        for name in sorted(found, key=str.encode):
            yield ObjectVersion(f"{root}/{name}", *found[name])

    def head(self, uri: str) -> ObjectVersion:
        """Return the file's current version. Raises NotFound."""
        for version in self.list(uri):
            if version.uri == uri:
                return version
        raise NotFound(f"{uri}: no such file in this dataset")

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Read a range of the object at the commit of its version; compare an object that is read whole with its
        SHA-256."""
        if not len(into):
            return
        repository, _, path = _split(version.uri)
        sha, _, oid = version.etag.partition("-")
        headers = {"Range": f"bytes={offset}-{offset + len(into) - 1}"}
        for _ in range(2):  # a signed URL may have expired
            url, fresh = self._place(version.uri, repository, sha, path, oid)
            if url:
                login = self._headers if url.startswith(f"{self.endpoint}/") else {}  # none for its storage
                with self._client.get(url, headers | login) as (response, connection):
                    if response.status == 403 and not fresh:
                        connection.read_error(response)
                        with self._lock:
                            self._signed.pop((sha, path), None)
                        continue
                    self._receive(version, offset, into, received, response, connection, "")
            else:
                resolve = self._resolve_url(repository, sha, path)
                with self._client.get(resolve, headers | self._headers) as (response, connection):
                    self._receive(version, offset, into, received, response, connection, oid)
            break
        if len(into) == version.size_bytes and (check := self.checker(version)):
            check([into])

    def checker(self, version: ObjectVersion) -> Checker | None:
        """Return a comparison with the SHA-256 of an LFS object; None for files of git, whose ids have a header in them."""
        oid = hub_sha256(version)
        if not oid:
            return None

        def check(data: Iterable[memoryview]) -> None:
            found = hashlib.sha256()
            for part in data:
                found.update(part)
            if found.hexdigest() == oid:
                return self._repeated.succeeded(version.uri, -1)
            if self._repeated.failed(version.uri, -1):
                raise CorruptData(
                    f"{version.uri} does not match its SHA-256 on the hub, twice; upload it again"
                )
            raise SourceUnavailable(f"{version.uri} arrived damaged: its SHA-256 differs")

        return check

    def _place(self, uri: str, repository: str, sha: str, path: str, oid: str) -> tuple[str, bool]:
        """Return the signed URL of an object, and whether it is new; "" for a file that the hub itself serves."""
        known = self._signed.get((sha, path))
        if known is not None:
            return known, False
        with self._client.get(
            self._resolve_url(repository, sha, path), {"Range": "bytes=0-0", **self._headers}
        ) as (response, connection):
            connection.read_error(response)
            if response.status not in (200, 206, *REDIRECTS):
                raise self._refusal(uri, response)
            check_no_page(uri, response.headers)
            linked = response.headers.get("x-linked-etag", "").strip('"')
            commit = response.headers.get("x-repo-commit", sha)
            if (linked and linked != oid) or commit != sha:
                raise SourceChanged(
                    f"{uri} is {linked or commit} on the hub, not {oid}; open the dataset again"
                )
            url = ""
            if response.status in REDIRECTS:
                url = redirected(self._resolve_url(repository, sha, path), response)
        with self._lock:
            if len(self._signed) >= _MAX_SIGNED:
                self._signed.clear()
            self._signed[sha, path] = url
        return url, True

    def _receive(
        self,
        version: ObjectVersion,
        offset: int,
        into: memoryview,
        received: OnReceived,
        response: Response,
        connection: HttpConnection,
        oid: str,
    ) -> None:
        """Check a response and receive its body. Its tag must be `oid`; "" for storage that has tags of its own."""
        if response.status not in (200, 206):
            connection.read_error(response)
            raise self._refusal(version.uri, response)
        asked = ObjectVersion(version.uri, version.size_bytes, oid)
        receive(asked, offset, into, received, response, connection, self._repeated)

    def _commit(self, repository: str, revision: str, uri: str) -> str:
        """Return the commit that a revision names now."""
        if _SHA.fullmatch(revision):
            return revision
        found, _ = self._json(f"/api/datasets/{repository}/revision/{quote(revision, safe='')}", uri)
        sha = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(sha, str) or not _SHA.fullmatch(sha):
            raise SourceUnavailable(f"{uri}: the hub names no commit for {revision!r}")
        return sha

    def _files(
        self, send: Send, repository: str, sha: str, below: str, uri: str
    ) -> Iterator[tuple[str, tuple[int, str]]]:
        """Yield (path, (size, version)) of the files in a folder, or of one file."""
        try:
            yield from self._tree(send, repository, sha, below, uri, recursive=True)
        except NotFound:
            folder, _, _ = below.rpartition("/")
            beside = dict(self._tree(send, repository, sha, folder, uri, recursive=False)) if below else {}
            if below not in beside:
                raise
            yield below, beside[below]

    def _tree(
        self, send: Send, repository: str, sha: str, below: str, uri: str, recursive: bool
    ) -> Iterator[tuple[str, tuple[int, str]]]:
        folder = f"/{quote(below)}" if below else ""
        place = f"/api/datasets/{repository}/tree/{sha}{folder}?recursive={str(recursive).lower()}"
        for _ in range(_MAX_PAGES):
            files, following = send(partial(self._page, place, sha, uri))
            yield from files
            if not following:
                return
            place = following
        raise SourceUnavailable(f"{uri}: the hub's listing does not end")

    def _page(self, place: str, sha: str, uri: str) -> tuple[Sequence[tuple[str, tuple[int, str]]], str]:
        """Return the files of one page of a tree, and the URL of the next page."""
        rows, following = self._json(place, uri)
        files = [_file(row, sha, uri) for row in (rows if isinstance(rows, list) else [None])]
        return [each for each in files if each], following

    def _json(self, place: str, uri: str) -> tuple[Any, str]:
        """Return the answer to a call of the hub's API, and the URL of its next page."""
        url = urljoin(self.endpoint + "/", place) if place.startswith("/") else place
        if not url.startswith(f"{self.endpoint}/"):
            raise SourceUnavailable(f"{uri}: the hub's next page is at another server")
        with self._client.get(url, self._headers) as (response, connection):
            if response.status != 200:
                connection.read_error(response)
                raise self._refusal(uri, response)
            body = connection.read_body(response, _MAX_PAGE_BYTES)
        following = _NEXT.search(response.headers.get("link", ""))
        try:
            return json.loads(body), following[1] if following else ""
        except (ValueError, RecursionError) as error:
            kind = response.headers.get("content-type", "no content type")
            raise SourceUnavailable(f"{uri}: the hub's answer is no JSON ({kind})") from error

    def _resolve_url(self, repository: str, sha: str, path: str) -> str:
        return f"{self.endpoint}/datasets/{repository}/resolve/{sha}/{quote(path)}"

    def _refusal(self, uri: str, response: Response) -> Exception:
        code = response.headers.get("x-error-code", "")
        if response.status in (401, 403) or code == "GatedRepo":
            return NotAllowed(
                f"{uri}: the hub refuses access ({response.status} {code}".rstrip() + f"); {_LOGIN}"
            )
        if response.status in REDIRECTS:
            return InvalidInput(f"{uri}: the dataset has moved on the hub; write its present name")
        if response.status == 404:
            what = {"RevisionNotFound": "no such revision", "RepoNotFound": "no such dataset"}.get(
                code, "no such file"
            )
            return NotFound(f"{uri}: {what} on the hub")
        return refusal(uri, response)


def open_hub() -> HubSource:
    """Open the hub that HF_ENDPOINT names, with the token of HF_TOKEN or of the file that `hf auth login` wrote."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return HubSource(endpoint, _token())


def _token() -> str:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    file = os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    token = os.environ.get("HF_TOKEN", "")
    if not token:
        try:
            token = Path(file).read_text()
        except OSError:  # nobody has logged in
            token = ""
    token = token.strip()
    if not token.isascii() or not token.isprintable():
        raise InvalidInput("HF_TOKEN holds something that no header can hold; set it anew")
    return token


def _split(uri: str) -> tuple[str, str, str]:
    """Return (repository, revision, path). Raises InvalidInput."""
    found = _URI.fullmatch(uri)
    if found is None:
        raise InvalidInput(
            f"{uri!r} is no dataset on the hub; write hf://datasets/OWNER/NAME[@REVISION]/path"
        )
    return found[1], found[2] or "main", found[3] or ""


def _file(row: object, sha: str, uri: str) -> tuple[str, tuple[int, str]] | None:
    """Return (path, (size, version)) of a row of a tree, None for a folder. Raises SourceUnavailable."""
    match row:
        case {"type": "file", "path": str(path), "size": int(size), "lfs": {"oid": str(oid)}} if size >= 0:
            return path, (size, f"{sha}-{oid}")
        case {"type": "file", "path": str(path), "size": int(size), "oid": str(oid)} if size >= 0:
            return path, (size, f"{sha}-{oid}")
        case {"type": "directory"}:
            return None
    raise SourceUnavailable(f"{uri}: the hub lists files without their names, sizes or ids")
