"""`cachesvc serve`: run this node's daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

import click

from cachesvc import config
from cachesvc.cli import config_file, options
from cachesvc.core.errors import InvalidInput, install
from cachesvc.system.footprint import default_ram_bytes
from cachesvc.system.memory import allowed_bytes

SERVER_MODULES = ("grpc_health", "grpc_reflection", "prometheus_client")


_OF_CLUSTER = {
    "node_name": "node_name",
    "advertise": "advertise",
    "zone": "zone",
    "domain": "by_zone",
    "rejoin_grace": "rejoin_grace_s",
    "cluster_wait": "wait_s",
    "peer_bandwidth": "bytes_per_s",
    "compare_peers": "compared_share",
    "share_prepared": "share_prepared",
    "drain_on_stop": "drain_on_stop_s",
    "tls_name": "tls_name",
}
"""Options that need --cluster, and the fields of `ClusterSettings` that they set."""
GROUPS = {
    "Memory and disks": (
        "ram",
        "nvme",
        "extent_bytes",
        "fillers",
        "scrub_rate",
        "unplanned_share",
        "preparing",
    ),
    "Data and users": ("allow", "quota", "source", "hedge", "stale_if_error"),
    "Clients": (
        "socket",
        "socket_mode",
        "listen",
        "s3",
        "s3_fresh",
        "s3_part",
        "s3_writes",
        "tls_cert",
        "tls_key",
        "tls_ca",
    ),
    "Cluster": ("cluster", *_OF_CLUSTER),
    "Service": ("config", "state_dir", "takeover", "metrics", "log_format", "log", "json"),
}
"""The options by group, in the order of the help."""
DEFAULTS: dict[str, Callable[..., str]] = {
    "extent_bytes": config.size_text,
    "s3_part": config.size_text,
    "fillers": str,
    "scrub_rate": config.size_text,
    "unplanned_share": "{:g}".format,
    "hedge": config.percent_text,
    "socket_mode": "{:o}".format,
    "log_format": str,
}
"""How the help shows defaults of settings."""
EXAMPLES = """\b
Examples:
  cachesvc serve --ram 50% --nvme /mnt/nvme0=80% --allow s3://bucket/ --metrics 127.0.0.1:9464
  cachesvc serve --cluster static:node1:7070,node2:7070 --tls-cert c.pem --tls-key k.pem --tls-ca ca.pem
"""


class ServeCommand(config_file.ConfiguredCommand):
    """The command, whose help lists its options by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group; others come last."""
        left = {str(each.name): each for each in self.get_params(ctx)}
        for title, names in GROUPS.items():
            _write(title, [left.pop(name) for name in names], ctx, formatter)
        _write("Other", list(left.values()), ctx, formatter)


@click.command(cls=ServeCommand, epilog=EXAMPLES)
@options.setting(
    "--config",
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=config_file.load,
    help="TOML file whose keys are these options.  [default: /etc/cachesvc/config.toml and, over it,"
    " $XDG_CONFIG_HOME/cachesvc/config.toml]",
)
@options.node_settings
@options.setting(
    "--scrub-rate",
    type=options.SIZE,
    help="Bytes/s at which NVMe copies are verified in the background; 0: none are.",
)
@options.setting(
    "--unplanned-share",
    type=options.Number(0, config.MAX_UNPLANNED_SHARE),
    metavar="PART",
    help="Part of each tier, 0 to 0.5, that is left to readers without a plan; 0: none. With --s3: 0.1.",
)
@options.setting(
    "--preparing",
    type=click.IntRange(1, 1024),
    help="Prepared extents that jobs on this node make at once.  [default: the cores]",
)
@options.setting("--socket", metavar="DIR", help="Directory for the sockets.")
@options.setting(
    "--socket-mode", type=options.OCTAL, help="File mode of the sockets; wider than 600 needs --allow."
)
@options.setting("--listen", type=options.ADDRESS, help="Serve gRPC on TCP too, at this address.")
@options.setting("--tls-cert", metavar="FILE", help="PEM certificate of the TCP port.")
@options.setting("--tls-key", metavar="FILE", help="PEM key of that certificate.")
@options.setting("--tls-ca", metavar="FILE", help="PEM certificates that sign clients'.")
@options.cluster_settings
@options.setting(
    "--metrics",
    type=options.ADDRESS,
    help="Serve Prometheus metrics and the status page at this address, such as 127.0.0.1:9464.",
)
@options.setting(
    "--s3",
    type=options.ADDRESS,
    help="Serve S3 at this address, such as 127.0.0.1:9000; other addresses need --tls-cert.",
)
@options.setting(
    "--s3-fresh",
    type=options.DURATION,
    metavar="TIME",
    help="Greatest age of metadata and listings by S3; 0 asks the source each time.  [default: 60s]",
)
@options.setting(
    "--s3-part",
    type=options.SIZE,
    help="Cut objects that no dataset has into parts of this size, where S3 reads them.",
)
@options.setting(
    "--s3-writes",
    multiple=True,
    metavar="PREFIX",
    help="Pass writes by S3 below this prefix on to the source; PREFIX=uid:1001,gid:ml for some users; repeatable.",
)
@options.setting(
    "--quota",
    type=options.QUOTA,
    multiple=True,
    metavar="NAME=SIZE",
    help="Keep no more of a dataset below a prefix, or for a client user (user=SIZE, user:UID=SIZE); repeatable.",
)
@options.setting(
    "--source",
    type=options.SOURCE,
    multiple=True,
    metavar="PREFIX,KEY=VALUE,...",
    help="Read objects below a prefix with an endpoint, region, profile, payer, rate or path of their own; repeatable.",
)
@options.setting(
    "--hedge",
    type=options.PERCENT,
    metavar="PERCENT",
    help="Bytes that late requests may ask of sources a second time, as a part of all; 0: none.",
)
@options.setting(
    "--stale-if-error",
    type=options.DURATION,
    metavar="TIME",
    help="While the source is down, open the version that was opened last, unless its listing is older; 0 turns this off.",
)
@options.setting(
    "--takeover",
    is_flag=True,
    help="Take over from the daemon that serves these sockets, with its extents in RAM; readers go on. Where"
    " there is none, start as usual.",
)
@options.setting("--log-format", type=click.Choice(["text", "json"]), help="Log lines.")
@options.setting(
    "--log",
    metavar="LEVEL",
    help="DEBUG, INFO, WARNING or ERROR; libraries log warnings alone.  [default: INFO]",
)
@click.option("--json", is_flag=True, help="The same as --log-format json.")
@click.pass_context
def serve(context: click.Context, /, json: bool, **given: Any) -> int:
    """Run this node's daemon until SIGTERM.

    Defaults: 10 % of this cgroup's memory, less where the daemon itself needs it; no NVMe; a socket for this user alone.
    Every option can be given as a variable: CACHESVC_RAM, CACHESVC_NVME, ...; lists are separated by spaces. Options go
    before variables, and variables before files.
    """
    if json:
        given["log_format"] = "json"
    settings = replace(settings_of(**given), origin=config_file.origin(context))
    config.validate(settings)
    if settings.s3:
        _check_s3(settings.s3, settings.source)
    try:
        for module in SERVER_MODULES:  # of the daemon's process, which this one does not load
            if find_spec(module) is None:
                raise ModuleNotFoundError(name=module)
        from cachesvc.daemon.parent.child_processes import launch_daemon
        from cachesvc.daemon.parent.service import run_service
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("cachesvc"):
            raise
        raise InvalidInput(f"the daemon needs {error.name}: {install('server')}") from None
    return run_service(settings, context.obj or launch_daemon)


def _check_s3(address: str, sections: Sequence[config.SourceSection]) -> None:
    """Raise InvalidInput where the endpoint would be its own source, or its library is missing."""
    if find_spec("aiohttp") is None:
        raise InvalidInput(f"--s3 needs aiohttp: {install('s3')}")
    named = {name: os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}
    named |= {f"--source {each.prefix}": each.endpoint for each in sections}
    for name, url in named.items():
        source = url.partition("://")[2].rstrip("/")
        if source.replace("localhost", "127.0.0.1") == address.replace("localhost", "127.0.0.1"):
            raise InvalidInput(f"--s3 {address} is the daemon's own source ({name}): choose another port")


_NAMES = {
    "hedge": "hedge_share",
    "stale_if_error": "stale_if_error_s",
    "s3_fresh": "s3_fresh_s",
    "s3_part": "s3_part_bytes",
}
"""Names of settings, where they differ from the option's."""


def settings_of(**options: Any) -> config.Settings:
    """Return the settings tree from command-line options; None takes the default of config.py."""
    given = {name: value for name, value in options.items() if value is not None}
    tls = [given.pop(name, "") for name in ("tls_cert", "tls_key", "tls_ca")]
    if any(tls) and not all(tls):
        raise InvalidInput("mutual TLS needs all three of --tls-cert, --tls-key and --tls-ca")
    of_cluster = {name: given.pop(name) for name in _OF_CLUSTER if name in given}
    members = given.pop("cluster", "")
    if of_cluster and not members:
        raise InvalidInput(
            f"--{next(iter(of_cluster)).replace('_', '-')} is of a cluster; give --cluster too"
        )
    if "log" in given:
        given["log"] = given["log"].upper()
    if given.get("s3"):
        given.setdefault("unplanned_share", config.S3_UNPLANNED_SHARE)
    allowed = [config.parse_allow(text) for text in given.pop("allow", ())]
    ram_bytes = given.pop("ram", None)
    settings = config.Settings(
        ram_bytes=ram_bytes or 0,
        nvme=given.pop("nvme", ()),
        allow=tuple(prefix for prefix, _ in allowed),
        rules=tuple(rule for _, rule in allowed if rule is not None),
        socket_dir=given.pop("socket", "") or config.default_socket_dir(),
        state_dir=given.pop("state_dir", "") or config.default_state_dir(),
        tls=config.Tls(certificate=tls[0], key=tls[1], ca=tls[2]) if all(tls) else None,
        cluster=_member(members, **of_cluster) if members else None,
        **{_NAMES.get(name, name): value for name, value in given.items()},
    )
    if ram_bytes is None:
        return replace(settings, ram_bytes=default_ram_bytes(allowed_bytes(), settings.own_bytes))
    return settings


def _member(members: str, **options: Any) -> config.ClusterSettings:
    given = {_OF_CLUSTER[name]: value for name, value in options.items()}
    name = given.pop("node_name", "") or config.default_node_name()
    advertise = given.pop("advertise", "") or f"{name}:{config.PEER_PORT}"
    by_zone = given.pop("by_zone", "zone") != "none"
    return config.ClusterSettings(members, name, advertise, by_zone=by_zone, **given)


def _write(
    title: str, options: Sequence[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    records = [(str(each.name), each.get_help_record(ctx)) for each in options]
    if rows := [(record[0], _with_default(name, record[1])) for name, record in records if record]:
        with formatter.section(title):
            formatter.write_dl(rows)


def _with_default(name: str, text: str) -> str:
    """Add the default of a setting, which is written in `config.Settings` alone."""
    if name not in DEFAULTS or "[default" in text:
        return text
    field = next(each for each in fields(config.Settings) if each.name == _NAMES.get(name, name))
    value = field.default_factory() if callable(field.default_factory) else field.default
    return f"{text}  [default: {DEFAULTS[name](value)}]"
