"""`cachesvc find`: print the samples of a dataset that match an expression."""

from __future__ import annotations

import sys
from typing import Any

import click

from cachesvc.cli import options, output
from cachesvc.core.safe_text import printable


@click.command()
@click.argument("name", metavar="URI|ID", shell_complete=options.known_uris)
@click.argument("expression")
@options.dataset
@click.option("--count", is_flag=True, help="Print only how many match.")
@options.daemon
def find(name: str, expression: str, count: bool, socket: str | None, json: bool, **given: Any) -> int:
    """Print the keys of the samples that match.

    Example: `cachesvc find s3://bucket/pets/ "label == 'cat'"`. Names are key, label and the dataset's tags; an unknown
    name is an error that lists them. Control characters in keys are escaped; --json prints keys as they are.
    """
    from cachesvc.cli.catalog_file import catalog_file

    with catalog_file(socket, name, options.dataset_options(given), json) as (catalog, _):
        indices = catalog.find(expression)
        if json and count:
            output.emit({"dataset": catalog.id, "count": len(indices), "samples": catalog.samples})
        elif count:
            output.say(str(len(indices)))
        elif json:
            for sample in indices.tolist():
                output.emit({"sample": sample, "key": catalog.key(sample)})
        else:
            with output.written():
                for sample in indices.tolist():
                    sys.stdout.write(f"{printable(catalog.key(sample))}\n")  # names in a tar may not be UTF-8
    return 0
