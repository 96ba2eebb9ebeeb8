"""What several verbs accept: sizes, cache directories, dataset options, the socket, `--json`."""

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
    """`64GiB`, `500GB` or plain bytes -> int."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes; a default that is already a number passes through."""
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
    """A number within bounds; `nan`, which no bound stops, and `inf` are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be counted with", param, ctx)
        return number


class Nvme(_Param):
    """`DIR=SIZE` or `DIR=80%` -> NvmeSpec."""

    name = "dir=size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> config.NvmeSpec:
        """The directory and its budget."""
        if isinstance(value, config.NvmeSpec):
            return value
        try:
            return config.parse_nvme(value)
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Quota(_Param):
    """`PREFIX=SIZE`, `user=SIZE` or `user:UID=SIZE` -> QuotaSpec."""

    name = "name=size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> config.QuotaSpec:
        """Whose quota, and its bytes."""
        if isinstance(value, config.QuotaSpec):
            return value
        try:
            return config.parse_quota(value)
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Octal(_Param):
    """`660` or `0o660` -> int."""

    name = "octal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """File mode bits, no more than 0777."""
        if isinstance(value, int):
            return value
        if not re.fullmatch(r"(0o)?[0-7]{1,4}", value) or int(value, 8) > 0o777:
            self.fail(f"{value!r} is not a file mode; write it as 660", param, ctx)
        return int(value, 8)


class Address(_Param):
    """`HOST:PORT`, kept as text."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The same text, checked."""
        host, _, port = str(value).rpartition(":")
        if (
            not host
            or re.search(r"[\s/]", host)
            or not re.fullmatch(r"[0-9]{1,5}", port)
            or not 0 < int(port) < 65536
        ):
            self.fail(f"{value!r} is not an address; write HOST:PORT", param, ctx)
        return str(value)


SIZE, NVME, OCTAL, ADDRESS = Size(), Nvme(), Octal(), Address()


def as_json(verb: _F) -> _F:
    """`--json`, passed as `json`."""
    return click.option("--json", is_flag=True, help="Print JSON, one object a line.")(verb)


def daemon(verb: _F) -> _F:
    """`--socket` and `--json` of every verb that asks the daemon."""
    socket = click.option(
        "--socket",
        metavar="DIR",
        envvar="CACHESVC_SOCKET",
        help="Directory of the daemon's sockets.  [default: $CACHESVC_SOCKET, /run/cachesvc,"
        " $XDG_RUNTIME_DIR/cachesvc]",
    )
    return socket(as_json(verb))


def dataset(verb: _F) -> _F:
    """How bytes become samples; passed as the fields of `catalog.build.Options`."""
    for option in (
        click.option(
            "--labels",
            default="",
            help="folder, none, or a CSV, TSV or JSONL file beside the data; class or float, alone or after a colon.",
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
            help="files, webdataset, mds, parquet, records or tokens; found out unless given.",
        ),
    ):
        verb = option(verb)
    return verb


def dataset_options(given: dict[str, Any]) -> Options:
    """The catalog's options from a verb's arguments. An extent size of 0 leaves the choice to the daemon."""
    from cachesvc.catalog.options import Options

    return Options(extent_bytes=0, **given)


def is_dataset_id(text: str) -> bool:
    """Whether an argument is a dataset id (32 hex digits), or the first 8 or more of one, instead of a URI. A path
    that is there is a path, unless it has all 32."""
    if re.fullmatch(r"[0-9a-f]{8,32}", text) is None:
        return False
    return len(text) == ID_DIGITS or not os.path.exists(text)


_SIZED = (
    click.option(
        "--ram", type=SIZE, envvar="CACHESVC_RAM", help="RAM budget.  [default: 10 % of this cgroup's]"
    ),
    click.option(
        "--nvme",
        type=NVME,
        multiple=True,
        envvar="CACHESVC_NVME",
        metavar="DIR=SIZE",
        help="Cache directory and its budget in bytes or as a share of its disk (80%); repeatable.",
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
SHARE = click.option(
    "--share",
    type=ADDRESS,
    envvar="CACHESVC_SHARE",
    help="Give other nodes what this one holds, at this address.",
)


def sized(verb: _F) -> _F:
    """What a daemon needs of its node and may serve: `doctor` looks at it, with the variables of `serve`."""
    for option in reversed(_SIZED):
        verb = option(verb)
    return verb


def serving(verb: _F) -> _F:
    """The options of a daemon: `serve` takes them, `run` hands them on. Each has a CACHESVC_* variable."""
    return sized(verb)
