"""`cachesvc serve`: run this node's daemon."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import click

from cachesvc import config
from cachesvc.cli import options
from cachesvc.core.errors import InvalidInput, install
from cachesvc.system.footprint import default_ram_bytes
from cachesvc.system.memory import allowed_bytes

SERVER_MODULES = ("grpc_health", "grpc_reflection", "prometheus_client")


@click.command()
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
    help="Part of each tier, 0 to 0.5, that is left to readers without a plan; 0: none.",
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
    help="Serve Prometheus metrics at this address, such as 127.0.0.1:9464.",
)
@options.setting(
    "--quota",
    type=options.QUOTA,
    multiple=True,
    metavar="NAME=SIZE",
    help="Keep no more of a dataset below a prefix, or for a client user (user=SIZE, user:UID=SIZE); repeatable.",
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
@click.option("--json", is_flag=True, help="The same as --log-format json.")
@click.pass_obj
def serve(launch: Any, /, json: bool, **given: Any) -> int:
    """Run this node's daemon until SIGTERM.

    Defaults: 10 % of this cgroup's memory, less where the daemon itself needs it; no NVMe; a socket for this user alone.
    Every option can be given as a variable: CACHESVC_RAM, CACHESVC_NVME, ...; lists are separated by spaces.
    """
    if json:
        given["log_format"] = "json"
    settings = settings_of(**given)
    config.validate(settings)
    try:
        for module in SERVER_MODULES:  # of the daemon's process, which this one does not load
            if find_spec(module) is None:
                raise ModuleNotFoundError(name=module)
        from cachesvc.daemon.parent.daemon_process import launch_daemon
        from cachesvc.daemon.parent.service import run_service
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("cachesvc"):
            raise
        raise InvalidInput(f"the daemon needs {error.name}: {install('server')}") from None
    return run_service(settings, launch or launch_daemon)


def settings_of(
    ram: int | None,
    nvme: tuple[config.NvmeSpec, ...],
    socket: str | None,
    state_dir: str | None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    allow: tuple[str, ...] = (),
    cluster: str | None = None,
    node_name: str | None = None,
    advertise: str | None = None,
    zone: str | None = None,
    domain: str | None = None,
    rejoin_grace: float | None = None,
    peer_bandwidth: int | None = None,
    tls_name: str | None = None,
    stale_if_error: float | None = None,
    **others: Any,
) -> config.Settings:
    """Return the settings tree from command-line options; None takes the default of config.py."""
    tls = None
    if tls_cert and tls_key and tls_ca:
        tls = config.Tls(certificate=tls_cert, key=tls_key, ca=tls_ca)
    elif tls_cert or tls_key or tls_ca:
        raise InvalidInput("mutual TLS needs all three of --tls-cert, --tls-key and --tls-ca")
    member = None
    if cluster:
        name = node_name or config.default_node_name()
        member = config.ClusterSettings(
            members=cluster,
            node_name=name,
            advertise=advertise or f"{name}:{config.PEER_PORT}",
            zone=zone or "",
            by_zone=domain != "none",
            rejoin_grace_s=config.REJOIN_GRACE_S if rejoin_grace is None else rejoin_grace,
            bytes_per_s=peer_bandwidth or 0,
            tls_name=tls_name or "",
        )
    else:
        given_alone = {
            "--node-name": node_name,
            "--advertise": advertise,
            "--zone": zone,
            "--domain": domain,
            "--rejoin-grace": rejoin_grace,
            "--peer-bandwidth": peer_bandwidth,
            "--tls-name": tls_name,
        }
        for option, value in given_alone.items():
            if value is not None:
                raise InvalidInput(f"{option} is of a cluster; give --cluster too")
    allowed = [config.parse_allow(text) for text in allow]
    others["stale_if_error_s"] = stale_if_error
    given = {name: value for name, value in others.items() if value is not None}
    settings = config.Settings(
        ram_bytes=ram or 0,
        nvme=nvme,
        allow=tuple(prefix for prefix, _ in allowed),
        rules=tuple(rule for _, rule in allowed if rule is not None),
        socket_dir=socket or config.default_socket_dir(),
        state_dir=state_dir or config.default_state_dir(),
        tls=tls,
        cluster=member,
        **given,
    )
    if ram is None:
        return replace(settings, ram_bytes=default_ram_bytes(allowed_bytes(), settings.own_bytes))
    return settings
