"""`cachesvc index`: build a dataset's catalog, and copy it on request: to a file, or beside the data."""

from __future__ import annotations

import os
import shutil
import stat
from typing import Any

import click

from cachesvc.cli import options, output, resolve
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, NotFound, OutOfSpace, SourceUnavailable


@click.command()
@click.argument("uri")
@options.dataset
@click.option(
    "--beside", is_flag=True, help="Leave the catalog beside the data, so that it is not indexed again."
)
@click.option("--output", "into", metavar="FILE", help="Write the catalog to this file.")
@options.daemon
def index(uri: str, beside: bool, into: str | None, socket: str | None, json: bool, **given: Any) -> int:
    """Build a dataset's catalog.

    The daemon builds it where one runs, else this command does, with the user's own rights.
    """
    from cachesvc.cli.catalog_file import catalog_file

    with catalog_file(socket, uri, options.dataset_options(given), json) as (catalog, path):
        written = []
        if into is not None:
            _copy_file(path, into)
            written.append(into)
        if beside:
            written.append(_publish_beside(path, resolve.absolute_uri(uri)))
        size_bytes, catalog_bytes = int(catalog.extent_sizes.sum()), os.stat(path).st_size
        row = {
            "event": "indexed",
            "dataset": catalog.id,
            "uri": catalog.uri,
            "format": catalog.format,
            "samples": catalog.samples,
            "extents": len(catalog.extent_sizes),
            "size_bytes": size_bytes,
            "stored_bytes": catalog.stored_bytes,
            "catalog_bytes": catalog_bytes,
            "written": written,
        }
    where = f"; written to {', '.join(written)}" if written else ""
    output.report(
        json,
        f"{uri} ({catalog.id}): {catalog.format}, {catalog.samples:,} samples in {row['extents']:,} extents,"
        f" {output.size(size_bytes)}, catalog {output.size(catalog_bytes)}{where}",
        row,
    )
    return 0


def _publish_beside(catalog: str, uri: str) -> str:
    """Copy a catalog file below a prefix URI and return its new URI.

    Raises InvalidInput where the URI is not one prefix, NotAllowed, NotFound or SourceUnavailable where it cannot be
    written.
    """
    from cachesvc.catalog.listing import BESIDE

    if any(mark in uri for mark in "*?{["):
        raise InvalidInput(f"{uri} names several places; a catalog lies beside one prefix: use --output FILE")
    scheme, _, rest = uri.partition("://")
    into = f"{uri.rstrip('/')}/{BESIDE}"
    if not rest or scheme == "file":
        local = into.removeprefix("file://")
        if not os.path.isdir(os.path.dirname(local)):
            raise InvalidInput(
                f"{uri} is no directory; a catalog lies beside a folder of data: use --output FILE"
            )
        _copy_file(catalog, local)
    elif scheme == "s3":
        _put_s3(catalog, into)
    else:
        _put_fsspec(catalog, into)
    return into


def _copy_file(path: str, into: str) -> None:
    """Copy under a temporary name, fsync, rename: `into` is complete or unchanged. Refuses to replace a link or device."""
    if os.path.lexists(into) and not stat.S_ISREG(os.lstat(into).st_mode):
        raise InvalidInput(f"{into} is no regular file; name a file")
    temporary = f"{into}.{os.getpid()}.tmp"
    try:
        with open(path, "rb") as origin, open(temporary, "wb") as copy:
            shutil.copyfileobj(origin, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(temporary, into)
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise unwritable(into, error) from None


def _put_s3(path: str, into: str) -> None:
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, key = into.removeprefix("s3://").partition("/")
    try:
        with open(path, "rb") as catalog:
            boto3.Session().client("s3").upload_fileobj(catalog, bucket, key)
    except ClientError as error:
        raise _refused(into, error.response["Error"].get("Code", "?")) from None
    except (Boto3Error, BotoCoreError) as error:
        raise SourceUnavailable(f"{into} cannot be written: {error}") from None


def _refused(into: str, code: str) -> CacheError:
    if code in ("NoSuchBucket", "404"):
        return NotFound(f"{into} cannot be written: there is no such bucket")
    if code in ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
        return NotAllowed(f"{into} cannot be written ({code}); use credentials that may, or --output FILE")
    return SourceUnavailable(f"{into} cannot be written: {code}")


def _put_fsspec(path: str, into: str) -> None:
    import fsspec

    try:
        with open(path, "rb") as catalog, fsspec.open(into, "wb") as copy:
            shutil.copyfileobj(catalog, copy, 1 << 20)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise InvalidInput(f"{into} cannot be written: {error}; use --output FILE") from None
    except OSError as error:
        raise unwritable(into, error) from None


def unwritable(into: str, error: OSError) -> CacheError:
    if isinstance(error, PermissionError):
        return NotAllowed(f"{into} may not be written by this user; name another place")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{into} cannot be written: no such directory")
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return InvalidInput(f"{into} cannot be written ({error.strerror}); name a file")
    return OutOfSpace(f"{into} cannot be written: {error.strerror or error}")
