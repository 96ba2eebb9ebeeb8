"""Options that several verbs share: sizes, cache directories, dataset options, the socket, `--json`."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cachesvc import config
from cachesvc.cluster.addresses import split_address
from cachesvc.config_files import parse_source
from cachesvc.core.errors import InvalidInput
from cachesvc.system.memory import allowed_bytes

if TYPE_CHECKING:
    from cachesvc.catalog.options import Options

    _Param = click.ParamType[Any]
else:
    _Param = click.ParamType  # generic from click 8.5 on only

_F = TypeVar("_F", bound=Callable[..., Any])
_MAX_BYTES = 1 << 62
ID_DIGITS = 32


class Parsed(_Param):
    """An argument that a function parses; a default that is no text is taken as it is."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the function makes of the text. Its InvalidInput is a usage error."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Number(click.FloatRange):
    """Parses a number within bounds. Refuses `nan`, which passes any bound, and `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def _size(text: str) -> int:
    """The bytes of `64GiB`, `500GB` or a plain number."""
    size = config.parse_size(text)
    if size > _MAX_BYTES:
        raise InvalidInput(f"{text!r} is more than any machine has")
    return size


def _duration(text: str) -> float:
    """The seconds of `24h`, `30m` or a plain number."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhd]?)\s*", text)
    if match is None:
        raise InvalidInput(f"{text!r} is no length of time; write it as 24h, 30m, 7d or plain seconds")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


def _file_mode(text: str) -> int:
    """The bits of `660` or `0o660`, 0777 at most."""
    if not re.fullmatch(r"(0o)?[0-7]{1,4}", text) or int(text, 8) > 0o777:
        raise InvalidInput(f"{text!r} is not a file mode; write it as 660")
    return int(text, 8)


def _address(text: str) -> str:
    """The same text, which is `HOST:PORT`."""
    split_address(text)
    return text


def _memory(text: str) -> int:
    """The bytes of a size, or of a part of the memory that this cgroup or machine allows: `50%`."""
    if not text.strip().endswith("%"):
        return _size(text)
    part = text.strip()[:-1].strip()
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3})?", part) is None or not 0 < float(part) <= 100:
        raise InvalidInput(f"{text!r} is not a part of the memory; write 1% to 100%")
    return int(allowed_bytes() * float(part) / 100)


def _percent(text: str) -> float:
    """The share of `2%`, or 0 of `0`."""
    match = re.fullmatch(r"\s*([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*(%?)\s*", text)
    if match is None or float(match[1]) > 100 or (not match[2] and float(match[1])):
        raise InvalidInput(f"{text!r} is no part; write it as 2%, or 0 for none")
    return float(match[1]) / 100


def _names(text: str) -> tuple[str, ...]:
    """The names of `NAME,...`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


RAM = Parsed("size", _memory)
SIZE, NVME = Parsed("size", _size), Parsed("dir=size", config.parse_nvme)
PERCENT = Parsed("percent", _percent)
QUOTA = Parsed("name=size", config.parse_quota)
SOURCE = Parsed("source", parse_source)
OCTAL, ADDRESS, DURATION = (
    Parsed("octal", _file_mode),
    Parsed("host:port", _address),
    Parsed("time", _duration),
)


def setting(name: str, **attributes: Any) -> Callable[[_F], _F]:
    """An option that has a variable too: CACHESVC_RAM for `--ram`."""
    variable = name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, envvar=f"CACHESVC_{variable}", **attributes)


def _together(*added: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options, in the order in which the help lists them."""

    def add(verb: _F) -> _F:
        for option in reversed(added):
            verb = option(verb)
        return verb

    return add


wide = click.option(
    "--wide",
    is_flag=True,
    help="Print all columns, whole, however wide the terminal is.  [default: lines that fit]",
)

daemon = _together(
    setting(
        "--socket",
        metavar="DIR",
        help="Directory of the daemon's sockets.  [default: $CACHESVC_SOCKET, /run/cachesvc,"
        " $XDG_RUNTIME_DIR/cachesvc]",
    ),
    click.option("--json", is_flag=True, help="Print JSON, one object a line."),
)
"""The options of verbs that call the daemon."""
saved_state = _together(
    click.option(
        "--state",
        metavar="FILE",
        help="A loader's saved state: JSON, or a file of torch.save, also inside a checkpoint.",
    ),
    click.option(
        "--name", default="", help="The state's place in a file that holds several, such as trainer.batches."
    ),
    click.option(
        "--catalog",
        "catalogs",
        multiple=True,
        metavar="FILE",
        help="The catalog of the state's dataset version, a copy that cachesvc index made; repeatable for a mixture.",
    ),
    click.option(
        "--counts",
        metavar="DIR",
        type=click.Path(exists=True, file_okay=False),
        help="The folder of pack(counts=), for packs with eos= or tokenize=.",
    ),
    click.option(
        "--ids",
        metavar="FILE",
        help="Indices that make the part of the dataset (np.save), where the state does not hold them.",
    ),
)
"""The options of verbs that compute from a saved state."""


def _keep(context: click.Context, option: click.Parameter, given: bool) -> None:
    context.meta[f"cachesvc.{option.name}"] = given
    if option.name == "verbose" and given:
        logging.basicConfig(format="%(levelname)s: %(message)s")
        logging.getLogger("cachesvc").setLevel(logging.DEBUG)


loudness = (
    click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_keep,
        help="No progress and no warnings.",
    ),
    click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        callback=_keep,
        help="Say on stderr which daemon is asked, what, and what is tried again.",
    ),
)
"""Options of verbs whose process ends with its answer."""


def known_uris(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the URIs of the datasets that the daemon knows and that begin so, for Tab; none where no daemon answers."""
    from cachesvc.client.control import Control
    from cachesvc.core.errors import CacheError

    try:
        with Control(context.params.get("socket")) as control:
            uris = {row.dataset.uri for row in control.list()}
    except CacheError:
        return []
    return sorted(uri for uri in uris if uri.startswith(incomplete))


def _formats(_context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of formats that begin so, for Tab. The opening checks what is given."""
    from cachesvc.catalog.formats.all_formats import FORMATS

    return [name for name in FORMATS if name.startswith(incomplete)]


split = click.option(
    "--split",
    default="",
    help="train, validation, test or another split that the names of files and folders tell; all for all of them.",
)
dataset = _together(
    click.option(
        "--format",
        shell_complete=_formats,
        default="",
        help="files, objects, whole, images, webdataset, mds, litdata, parquet, arrow, jsonl, csv, text, "
        "documents, tfrecord, records or tokens; inferred unless given.",
    ),
    click.option("--dtype", default="", help="numpy dtype of tokens or record elements."),
    click.option("--seq-len", type=click.IntRange(0), default=0, help="Tokens of one sample (tokens)."),
    click.option("--overlap", type=click.IntRange(0), default=0, help="Tokens shared with the next sample."),
    click.option("--record-bytes", type=SIZE, default=0, help="Bytes of one record (records)."),
    click.option("--header-bytes", type=SIZE, default=0, help="Bytes before the items of each .bin."),
    click.option(
        "--separator", default="", help="The character between the cells of CSV; inferred unless given."
    ),
    split,
    click.option(
        "--fields",
        type=Parsed("name,...", _names),
        metavar="NAME,...",
        default=(),
        help="Fetch these fields alone (parquet), as open_dataset(fields=) does.",
    ),
    click.option(
        "--on-error",
        type=click.Choice(["raise", "skip"]),
        default="raise",
        help="skip leaves out damaged tars.",
    ),
    click.option(
        "--labels",
        default="",
        help="folder, none, or a CSV, TSV or JSONL file beside the data; class or float, alone or after a colon; or "
        "names of columns as JSON.",
    ),
)
"""The options of a dataset, which are passed as the fields of `catalog.options.Options`."""


def dataset_options(given: dict[str, Any]) -> Options:
    """Return the catalog's options from a verb's arguments. The extent size is the daemon's."""
    from cachesvc.catalog.options import Options, fields_text

    names = given.pop("fields")
    return Options(extent_bytes=0, fields=fields_text(names) if names else "", **given)


def is_dataset_id(text: str) -> bool:
    """Tell whether an argument is a dataset id, 32 hex digits or at least the first 8, and not a URI.

    A prefix of an id that is also an existing path is a path.
    """
    if re.fullmatch(r"[0-9a-f]{8,32}", text) is None:
        return False
    return len(text) == ID_DIGITS or not os.path.exists(text)


node_settings = _together(
    setting(
        "--ram",
        type=RAM,
        metavar="SIZE|PERCENT",
        help="RAM budget, also as a part of this cgroup's or machine's memory (50%).  [default: 10%]",
    ),
    setting(
        "--nvme",
        type=NVME,
        multiple=True,
        metavar="DIR=SIZE[,mounted]",
        help="Cache directory and its budget in bytes or as a share of its disk (80%); repeatable. With ,mounted the daemon"
        " starts only if a disk is mounted there.",
    ),
    setting(
        "--allow",
        multiple=True,
        metavar="PREFIX",
        help="Serve only sources below this prefix, to these users only where it ends in"
        " =uid:ID,gid:ID,...; repeatable.",
    ),
    setting("--extent-bytes", type=SIZE, help="Size of an extent."),
    setting("--state-dir", metavar="DIR", help="Catalogs and metadata."),
    setting("--fillers", type=click.IntRange(1, 64), help="Filler processes."),
)
"""The options for a node's memory, disks and sources, each with a CACHESVC_* variable."""
cluster_settings = _together(
    setting(
        "--cluster",
        metavar="MEMBERS",
        help="Share extents with other nodes, listed in static:HOSTS:PORT, file:///PATH, dns+srv://NAME or"
        " etcd://HOST:PORT/PREFIX.",
    ),
    setting(
        "--node-name",
        metavar="NAME",
        help="Name of this node in the cluster.  [default: $SLURMD_NODENAME, or the host's name]",
    ),
    setting(
        "--advertise",
        type=ADDRESS,
        help=f"Address at which this node answers others; the next port sends extents.  [default: NAME:{config.PEER_PORT}]",
    ),
    setting("--zone", metavar="NAME", help="Zone of this node."),
    setting(
        "--domain",
        type=click.Choice(["zone", "none"]),
        help="zone: each zone holds its own copy, and no extent crosses zones; none: zones do not count.  [default: zone]",
    ),
    setting(
        "--rejoin-grace",
        type=Number(0, 86_400),
        metavar="SECONDS",
        help="How long a node that is away keeps its share.  [default: 600]",
    ),
    setting(
        "--cluster-wait",
        type=Number(0, 86_400),
        metavar="SECONDS",
        help="How long reads of uncached data wait after the start for the first list of members.  [default: 60]",
    ),
    setting(
        "--peer-bandwidth", type=SIZE, help="The most bytes/s that this node sends to others; 0: no limit."
    ),
    setting(
        "--compare-peers",
        type=Number(0, 1),
        metavar="PART",
        help="Part of the extents from other nodes, 0 to 1, that is fetched from the source too and compared; 0: none."
        "  [default: 0.01, divided by the number of other nodes]",
    ),
    setting(
        "--share-prepared",
        is_flag=True,
        default=None,
        help="Give what a user prepared to the same uid on other nodes that have this option, and read it from them:"
        " only complete copies.",
    ),
    setting(
        "--drain-on-stop",
        type=DURATION,
        metavar="TIME",
        help="On SIGTERM, hand on what this node alone holds, for so long, and leave for good, as `cachesvc drain` does;"
        " 0: only say goodbye.  [default: 0]",
    ),
    setting(
        "--tls-name", metavar="NAME", help="Name in the one certificate that all nodes of the cluster use."
    ),
)
"""The options of a cluster, each with a CACHESVC_* variable."""
