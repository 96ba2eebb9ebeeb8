"""`cachesvc config show | check | schema`: the settings of `serve`, and where each comes from."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from cachesvc import config as settings_tree
from cachesvc.cli import config_file, output
from cachesvc.cli.serve import serve, settings_of
from cachesvc.config import Settings, nvme_text, percent_text, size_text
from cachesvc.config_files import source_text

_ARGUMENTS = click.argument("given", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SERVE]...")
_PASS_ON = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


@click.group()
@click.option("--json", is_flag=True, help="The same as --json of the command below it.")
@click.pass_context
def config(context: click.Context, json: bool) -> None:
    """Show, check or describe the settings of `serve`."""
    context.obj = json


@config.command(context_settings=_PASS_ON)
@_ARGUMENTS
@click.option("--settings", is_flag=True, hidden=True, help="Print the settings as the daemon takes them.")
@click.option("--json", is_flag=True, help="Print JSON, one object a line.")
@click.pass_obj
def show(inherited: bool, given: Sequence[str], settings: bool, json: bool) -> int:
    """Print each setting, its value, and the flag, variable or file that it comes from.

    Give it the options and variables of `serve`.
    """
    context, found = resolved(given)
    if settings:
        import msgspec

        output.say(msgspec.json.encode(found).decode())
        return 0
    set_by = {key: origin for key, _, origin in config_file.described(context)}
    rows = [(key, value, set_by.get(key, "default")) for key, value in _values(found, context).items()]
    if json or inherited:
        for key, value, origin in rows:
            output.emit({"key": key, "value": value, "from": origin})
    else:
        output.table(
            ["setting", "value", "from"], [[key, _toml(value), origin] for key, value, origin in rows]
        )
    return 0


@config.command(context_settings=_PASS_ON)
@_ARGUMENTS
@click.option("--json", is_flag=True, help="Print JSON, one object a line.")
@click.pass_obj
def check(inherited: bool, given: Sequence[str], json: bool) -> int:
    """Exit 0 if `serve` would take the files, variables and options, else print why not.

    Nothing is opened: cache directories, certificates and sources are not looked at.
    """
    context, found = resolved(given)
    settings_tree.validate(found)
    files = sorted(set(context.meta[config_file.FILES].values()))
    output.report(json or inherited, f"good: {', '.join(files) or 'no file sets anything'}", {"files": files})
    return 0


@config.command()
@click.option("--json", is_flag=True, help="The schema is JSON in any case.")
def schema(json: bool) -> int:
    """Print the JSON schema of a configuration file, for editors."""
    output.say(json_module.dumps(config_file.schema(serve), indent=2))
    return 0


def resolved(given: Sequence[str]) -> tuple[click.Context, Settings]:
    """Return the context and the settings of `serve` with these arguments. Raises what `serve` raises for them."""
    context = serve.make_context("serve", list(given))
    options = dict(context.params)
    if options.pop("json"):
        options["log_format"] = "json"
    return context, replace(settings_of(**options), origin=config_file.origin(context))


def _values(found: Settings, context: click.Context) -> dict[str, object]:
    """Return the value of each key as a file would have it; "" and [] where it is not set and has no default."""
    tls = found.tls or settings_tree.Tls("", "", "")
    quotas = [f"{quota.of}={_size(quota.size_bytes)}" for quota in found.quota]
    values: dict[str, object] = {
        "ram": _size(found.ram_bytes),
        "nvme": [nvme_text(spec) for spec in found.nvme],
        "allow": list(context.params["allow"]),
        "extent-bytes": _size(found.extent_bytes),
        "state-dir": found.state_dir,
        "fillers": found.fillers,
        "scrub-rate": _size(found.scrub_rate),
        "unplanned-share": found.unplanned_share,
        "preparing": found.preparing,
        "socket": found.socket_dir,
        "socket-mode": f"{found.socket_mode:o}",
        "listen": found.listen,
        "tls-cert": tls.certificate,
        "tls-key": tls.key,
        "tls-ca": tls.ca,
        "metrics": found.metrics,
        "s3": found.s3,
        "s3-fresh": f"{found.s3_fresh_s:g}s",
        "s3-part": _size(found.s3_part_bytes),
        "s3-writes": list(found.s3_writes),
        "quota": quotas,
        "source": [source_text(section) for section in found.source],
        "hedge": percent_text(found.hedge_share),
        "stale-if-error": f"{found.stale_if_error_s:g}s",
        "log-format": found.log_format,
        "log": found.log,
    }
    if (member := found.cluster) is not None:
        values |= {
            "cluster": member.members,
            "node-name": member.node_name,
            "advertise": member.advertise,
            "zone": member.zone,
            "domain": "zone" if member.by_zone else "none",
            "rejoin-grace": member.rejoin_grace_s,
            "cluster-wait": member.wait_s,
            "peer-bandwidth": _size(member.bytes_per_s),
            "share-prepared": member.share_prepared,
            "drain-on-stop": f"{member.drain_on_stop_s:g}s",
            "compare-peers": "" if member.compared_share is None else member.compared_share,
            "tls-name": member.tls_name,
        }
    return values


def _size(size_bytes: int) -> str:
    text = size_text(size_bytes)
    return str(size_bytes) if " " in text else text


def _toml(value: Any) -> str:
    return json_module.dumps(value, ensure_ascii=False)
