"""`cachesvc index`: build a dataset's catalog, and leave it beside the data on request."""

from __future__ import annotations

import os
from typing import Any

import click

from cachesvc.cli import options, output, resolve


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
    from cachesvc.cli.catalogs.catalog_file import catalog_file
    from cachesvc.cli.catalogs.publish_catalog import copy_file, publish_beside

    with catalog_file(socket, uri, options.dataset_options(given), json) as (catalog, path):
        written = []
        if into is not None:
            copy_file(path, into)
            written.append(into)
        if beside:
            written.append(publish_beside(path, resolve.absolute_uri(uri)))
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
    if json:
        output.emit(row)
    else:
        where = f"; written to {', '.join(written)}" if written else ""
        output.say(
            f"{uri} ({catalog.id}): {catalog.format}, {catalog.samples:,} samples in {row['extents']:,} extents,"
            f" {output.size(size_bytes)}, catalog {output.size(catalog_bytes)}{where}"
        )
    return 0
