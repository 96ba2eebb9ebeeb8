"""Options that several verbs share: sizes, cache directories, dataset options, the socket, `--json`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cachesvc import config
from cachesvc.core.errors import InvalidInput

if TYPE_CHECKING:
    from cachesvc.catalog.options import Options

    _Param = click.ParamType[Any]
else:
    _Param = click.ParamType  # generic from click 8.5 on only

_F = TypeVar("_F", bound=Callable[..., Any])
_MAX_BYTES = 1 << 62
ID_DIGITS = 32


class Size(_Param):
    """Parses `64GiB`, `500GB` or plain bytes to an int."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes; a number is returned as it is."""
        if isinstance(value, int):
            return value
        try:
            size = config.parse_size(value)
        except InvalidInput as error:
            self.fail(str(error), param, ctx)
        if size > _MAX_BYTES:
            self.fail(f"{value!r} is more than any machine has", param, ctx)
        return size


class Number(click.FloatRange):
    """Parses a number within bounds. Refuses `nan`, which passes any bound, and `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Duration(_Param):
    """Parses `24h`, `30m` or plain seconds to seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds; a number is returned as it is."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhd]?)\s*", value)
        if match is None:
            self.fail(
                f"{value!r} is no length of time; write it as 24h, 30m, 7d or plain seconds", param, ctx
            )
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


class Nvme(_Param):
    """Parses `DIR=SIZE` or `DIR=80%`, with or without `,mounted`, to an NvmeSpec."""

    name = "dir=size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> config.NvmeSpec:
        """Return the directory and its budget."""
        if isinstance(value, config.NvmeSpec):
            return value
        try:
            return config.parse_nvme(value)
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Quota(_Param):
    """Parses `PREFIX=SIZE`, `user=SIZE` or `user:UID=SIZE` to a QuotaSpec."""

    name = "name=size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> config.QuotaSpec:
        """Return the quota."""
        if isinstance(value, config.QuotaSpec):
            return value
        try:
            return config.parse_quota(value)
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Octal(_Param):
    """Parses `660` or `0o660` to an int."""

    name = "octal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return file mode bits, 0777 at most."""
        if isinstance(value, int):
            return value
        if not re.fullmatch(r"(0o)?[0-7]{1,4}", value) or int(value, 8) > 0o777:
            self.fail(f"{value!r} is not a file mode; write it as 660", param, ctx)
        return int(value, 8)


class Address(_Param):
    """Checks `HOST:PORT` and keeps it as text."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the same text."""
        host, _, port = str(value).rpartition(":")
        if (
            not host
            or re.search(r"[\s/]", host)
            or not re.fullmatch(r"[0-9]{1,5}", port)
            or not 0 < int(port) < 65536
        ):
            self.fail(f"{value!r} is not an address; write HOST:PORT", param, ctx)
        return str(value)


SIZE, NVME, OCTAL, ADDRESS, DURATION = Size(), Nvme(), Octal(), Address(), Duration()


def as_json(verb: _F) -> _F:
    """Add `--json`, passed as `json`."""
    return click.option("--json", is_flag=True, help="Print JSON, one object a line.")(verb)


def daemon(verb: _F) -> _F:
    """Add `--socket` and `--json`, for verbs that call the daemon."""
    socket = click.option(
        "--socket",
        metavar="DIR",
        envvar="CACHESVC_SOCKET",
        help="Directory of the daemon's sockets.  [default: $CACHESVC_SOCKET, /run/cachesvc,"
        " $XDG_RUNTIME_DIR/cachesvc]",
    )
    return socket(as_json(verb))


def split(verb: _F) -> _F:
    """Add `--split`."""
    return click.option(
        "--split",
        default="",
        help="train, validation, test or another split that the names of files and folders tell; all for all of them.",
    )(verb)


def dataset(verb: _F) -> _F:
    """Add the options of a dataset; they are passed as the fields of `catalog.options.Options`."""
    for option in (
        click.option(
            "--labels",
            default="",
            help="folder, none, or a CSV, TSV or JSONL file beside the data; class or float, alone or after a colon; or "
            "names of columns as JSON.",
        ),
        click.option(
            "--on-error",
            type=click.Choice(["raise", "skip"]),
            default="raise",
            help="skip leaves out damaged tars.",
        ),
        click.option(
            "--fields",
            metavar="NAME,...",
            default="",
            help="Fetch these fields alone (parquet), as open_dataset(fields=) does.",
        ),
        split,
        click.option(
            "--separator", default="", help="The character between the cells of CSV; inferred unless given."
        ),
        click.option("--header-bytes", type=SIZE, default=0, help="Bytes before the items of each .bin."),
        click.option("--record-bytes", type=SIZE, default=0, help="Bytes of one record (records)."),
        click.option(
            "--overlap", type=click.IntRange(0), default=0, help="Tokens shared with the next sample."
        ),
        click.option("--seq-len", type=click.IntRange(0), default=0, help="Tokens of one sample (tokens)."),
        click.option("--dtype", default="", help="numpy dtype of tokens or record elements."),
        click.option(
            "--format",
            default="",
            help="files, objects, images, webdataset, mds, litdata, parquet, arrow, jsonl, csv, text, documents, "
            "tfrecord, records or tokens; inferred unless given.",
        ),
    ):
        verb = option(verb)
    return verb


def dataset_options(given: dict[str, Any]) -> Options:
    """Return the catalog's options from a verb's arguments. The extent size is the daemon's."""
    from cachesvc.catalog.options import Options, fields_text

    names = [name.strip() for name in given.pop("fields").split(",") if name.strip()]
    return Options(extent_bytes=0, fields=fields_text(names) if names else "", **given)


def is_dataset_id(text: str) -> bool:
    """Tell whether an argument is a dataset id, 32 hex digits or at least the first 8, and not a URI.

    A prefix of an id that is also an existing path is a path.
    """
    if re.fullmatch(r"[0-9a-f]{8,32}", text) is None:
        return False
    return len(text) == ID_DIGITS or not os.path.exists(text)


_NODE_SETTINGS = (
    click.option(
        "--ram", type=SIZE, envvar="CACHESVC_RAM", help="RAM budget.  [default: 10 % of this cgroup's]"
    ),
    click.option(
        "--nvme",
        type=NVME,
        multiple=True,
        envvar="CACHESVC_NVME",
        metavar="DIR=SIZE[,mounted]",
        help="Cache directory and its budget in bytes or as a share of its disk (80%); repeatable. With ,mounted the daemon"
        " starts only if a disk is mounted there.",
    ),
    click.option(
        "--allow",
        multiple=True,
        envvar="CACHESVC_ALLOW",
        metavar="PREFIX",
        help="Serve only sources below this prefix, to these users only where it ends in"
        " =uid:ID,gid:ID,...; repeatable.",
    ),
    click.option("--extent-bytes", type=SIZE, envvar="CACHESVC_EXTENT_BYTES", help="Size of an extent."),
    click.option("--state-dir", metavar="DIR", envvar="CACHESVC_STATE_DIR", help="Catalogs and metadata."),
    click.option(
        "--fillers", type=click.IntRange(1, 64), envvar="CACHESVC_FILLERS", help="Filler processes."
    ),
)
_CLUSTER = (
    click.option(
        "--cluster",
        metavar="MEMBERS",
        envvar="CACHESVC_CLUSTER",
        help="Share extents with other nodes, listed in static:HOSTS:PORT, file:///PATH, dns+srv://NAME or"
        " etcd://HOST:PORT/PREFIX.",
    ),
    click.option(
        "--node-name",
        envvar="CACHESVC_NODE_NAME",
        metavar="NAME",
        help="Name of this node in the cluster.  [default: $SLURMD_NODENAME, or the host's name]",
    ),
    click.option(
        "--advertise",
        type=ADDRESS,
        envvar="CACHESVC_ADVERTISE",
        help=f"Address at which this node answers others; the next port sends extents.  [default: NAME:{config.PEER_PORT}]",
    ),
    click.option("--zone", envvar="CACHESVC_ZONE", metavar="NAME", help="Zone of this node."),
    click.option(
        "--domain",
        type=click.Choice(["zone", "none"]),
        envvar="CACHESVC_DOMAIN",
        help="zone: each zone holds its own copy, and no extent crosses zones; none: zones do not count.  [default: zone]",
    ),
    click.option(
        "--rejoin-grace",
        type=Number(0, 86_400),
        envvar="CACHESVC_REJOIN_GRACE",
        metavar="SECONDS",
        help="How long a node that is away keeps its share.  [default: 600]",
    ),
    click.option(
        "--peer-bandwidth",
        type=SIZE,
        envvar="CACHESVC_PEER_BANDWIDTH",
        help="The most bytes/s that this node sends to others; 0: no limit.",
    ),
    click.option(
        "--tls-name",
        metavar="NAME",
        envvar="CACHESVC_TLS_NAME",
        help="Name in the one certificate that all nodes of the cluster use.",
    ),
)


def cluster_settings(verb: _F) -> _F:
    """Add the options of a cluster, each with a CACHESVC_* variable."""
    for option in reversed(_CLUSTER):
        verb = option(verb)
    return verb


def node_settings(verb: _F) -> _F:
    """Add the options for a node's memory, disks and sources, each with a CACHESVC_* variable."""
    for option in reversed(_NODE_SETTINGS):
        verb = option(verb)
    return verb
