"""URLs of the file system: `cachesvc://SCHEME/REST` is read as `SCHEME://REST`.

    cachesvc://s3/bucket/key                    s3://bucket/key
    cachesvc://gs/bucket/key                    gs://bucket/key
    cachesvc://az/container/key                 az://container/key
    cachesvc://hf/datasets/owner/name/file      hf://datasets/owner/name/file
    cachesvc://https/host/file                  https://host/file
    cachesvc://file/data/x.parquet              file:///data/x.parquet

The source's scheme is the first segment of the path. So one form covers every source that datasets are read from, and it
has one `//`. A second one would be lost in pathlib, in `posixpath.normpath` and in the parents that fsspec derives.
"""

from __future__ import annotations

import re

from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.sources.uri import WEB, canonical

PROTOCOL = "cachesvc"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}")
_AS_URI = re.compile(rf"({_SCHEME.pattern}):///?")


def stripped(url: str) -> str:
    """Return the path of a URL, without the protocol and slashes at its end; the inverse of `uri_of`. Absolute local paths
    and URIs of sources are taken, too."""
    path = url.removeprefix(f"{PROTOCOL}://")
    if path.startswith("/"):
        path = f"file{path}"
    return _AS_URI.sub(r"\1/", path, 1).rstrip("/") if _AS_URI.match(path) else path.rstrip("/")


def uri_of(path: str) -> str:
    """Return the URI that a path stands for. A key of a bucket may hold anything, as in a listing. Raises NotFound for a
    path without a bucket, host or file, InvalidInput for a malformed one."""
    scheme, _, rest = path.partition("/")
    if not rest:
        raise NotFound(f"{PROTOCOL}://{path} names no data; write {PROTOCOL}://s3/bucket/key")
    if not _SCHEME.fullmatch(scheme):
        raise InvalidInput(
            f"{PROTOCOL}://{path} does not begin with a scheme; write {PROTOCOL}://s3/bucket/key"
        )
    if scheme == "file" or f"{scheme.lower()}://" in WEB:
        return canonical(f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}").rstrip("/")
    bucket, slash, key = rest.partition("/")
    return f"{canonical(f'{scheme}://{bucket}')}{slash}{key}".rstrip("/")


def opens_by_name(uri: str) -> bool:
    """Tell whether the dataset of this URI is this one object or folder. Names with marks of patterns, and keys that are
    not canonical (`a//b`, `a/../b`), are found in the listing of a folder above them."""
    if any(mark in uri for mark in ("{" if uri.startswith(WEB) else "*?[{")):
        return False
    try:
        return canonical(uri) == uri
    except InvalidInput:
        return False
