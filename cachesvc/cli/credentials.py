"""`cachesvc credentials` and `cachesvc env`: keys of this user for the node's S3 endpoint, as clients take them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from cachesvc.cli import options, output
from cachesvc.cli.index import unwritable
from cachesvc.client.control import find_daemon
from cachesvc.config import socket_dirs
from cachesvc.core.errors import DaemonUnavailable, InvalidInput

REGION = "us-east-1"
"""Clients of S3 sign for a region. The endpoint takes any."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def _keys(socket: str | None, lifetime_s: int) -> dict[str, Any]:
    from cachesvc.gateway.s3.keys import ask_for_keys

    directory = socket or find_daemon()
    if directory is None:
        raise DaemonUnavailable(f"no daemon is listening in {' or '.join(socket_dirs())}")
    return ask_for_keys(directory, lifetime_s)


@click.command(hidden=True)
@options.daemon
def credentials(socket: str | None, json: bool) -> int:
    """Print keys for the S3 endpoint, for an AWS profile.

    They are those of this user, for an hour, in the form of a `credential_process`: clients that have it run this again.
    """
    from cachesvc.gateway.s3.keys import LIFETIME_S

    found = _keys(socket, LIFETIME_S)
    del found["Endpoint"]
    output.emit(found)
    return 0


def _boto3(endpoint: str, keys: dict[str, str]) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL_S3": endpoint, **keys, "AWS_DEFAULT_REGION": REGION}


def _s3_endpoint_url(endpoint: str, keys: dict[str, str]) -> dict[str, str]:
    return {"S3_ENDPOINT_URL": endpoint, **keys, "AWS_REGION": REGION}


def _object_store(endpoint: str, keys: dict[str, str]) -> dict[str, str]:
    more = {"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http:") else {}
    return {"AWS_ENDPOINT": endpoint, **more, **keys, "AWS_REGION": REGION}


def _rclone(endpoint: str, keys: dict[str, str]) -> dict[str, str]:
    names = {
        "AWS_ACCESS_KEY_ID": "ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY": "SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN": "SESSION_TOKEN",
    }
    fixed = {"TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": endpoint, "REGION": REGION}
    given = fixed | {names[name]: value for name, value in keys.items()}
    return {f"RCLONE_CONFIG_CACHESVC_{name}": value for name, value in given.items()}


CLIENTS = {
    "boto3": _boto3,
    "aws": _boto3,
    "s3fs": _boto3,
    "pyarrow": _boto3,
    "litdata": _boto3,
    "s3torchconnector": _boto3,
    "s5cmd": _s3_endpoint_url,
    "streaming": _s3_endpoint_url,
    "lance": _object_store,
    "polars": _object_store,
    "rclone": _rclone,
}
"""The variables that each client reads. None gets AWS_ENDPOINT_URL, which is of all services."""


@click.command()
@click.option("--profile", metavar="NAME", help="Write a profile of this name to the AWS configuration.")
@click.option(
    "--client",
    type=click.Choice(sorted(CLIENTS)),
    default="boto3",
    help="The client that the variables are for.  [default: boto3]",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="The endpoint as programs here reach it, such as that of a Service.  [default: as the daemon serves it]",
)
@options.daemon
def env(profile: str | None, client: str, endpoint: str | None, socket: str | None, json: bool) -> int:
    """Print variables, or write a profile, for the S3 endpoint.

    Example: `eval "$(cachesvc env --client s5cmd)"`. The keys in variables last for twelve hours. With --profile, clients
    renew them: `AWS_PROFILE=NAME`.
    """
    from cachesvc.gateway.s3.keys import MAX_LIFETIME_S

    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise InvalidInput(f"--endpoint {endpoint}: write it with its scheme, such as http://127.0.0.1:9000")
    found = _keys(socket, MAX_LIFETIME_S)
    endpoint = endpoint or str(found["Endpoint"])
    if profile is not None:
        path = _write_profile(profile, endpoint, socket or os.environ.get("CACHESVC_SOCKET"))
        output.report(
            json,
            f"profile {profile} in {path} leads to {endpoint}: AWS_PROFILE={profile}",
            {"event": "profile", "profile": profile, "file": path, "endpoint": endpoint},
        )
        return 0
    keys = {
        "AWS_ACCESS_KEY_ID": found["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": found["SecretAccessKey"],
        "AWS_SESSION_TOKEN": found["SessionToken"],
    }
    variables = CLIENTS[client](endpoint, keys)
    if json:
        output.emit(variables)
    else:
        with output.written():
            for name, value in variables.items():
                sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    return 0


def _write_profile(name: str, endpoint: str, socket: str | None) -> str:
    """Write a profile to the AWS configuration, in place of one that this command wrote before; return the file's path.

    Raises InvalidInput for a name that others have used, NotAllowed where the file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"--profile {name!r}: use letters, digits, dots, hyphens and underscores")
    path = _aws_file("AWS_CONFIG_FILE", "config")
    begin, end = f"# cachesvc env --profile {name}: begin", f"# cachesvc env --profile {name}: end"
    own = shutil.which("cachesvc")
    command = shlex.join([os.path.abspath(own)] if own else [sys.executable, "-m", "cachesvc"])
    where = f" --socket {shlex.quote(os.path.abspath(socket))}" if socket else ""
    title = "default" if name == "default" else f"profile {name}"
    block = f"""{begin}
[{title}]
credential_process = {command} credentials{where}
region = {REGION}
services = cachesvc-{name}
s3 =
    addressing_style = path

[services cachesvc-{name}]
s3 =
    endpoint_url = {endpoint}
{end}
"""
    try:
        before = path.read_text() if path.exists() else ""
        head, found, rest = before.partition(f"{begin}\n")
        tail = rest.partition(f"{end}\n")[2] if found else ""
        if re.search(rf"^\[{re.escape(title)}\]", head + tail, re.M):
            raise InvalidInput(f"{path} has a profile {name} of another origin: choose another name")
        keys = _aws_file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
        if keys.exists() and re.search(rf"^\[{re.escape(name)}\]", keys.read_text(), re.M):
            raise InvalidInput(f"{keys} has keys of a profile {name}, which come first: choose another name")
        joined = head if not head or head.endswith("\n") else f"{head}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        part.touch(0o600)
        part.write_text(f"{joined}{block}{tail}")
        if path.exists():
            part.chmod(path.stat().st_mode & 0o777)
        os.replace(part, path)
    except OSError as error:
        raise unwritable(str(path), error) from None
    return str(path)


def _aws_file(variable: str, name: str) -> Path:
    """Return a file of the AWS configuration, the one that a link leads to."""
    return Path(os.environ.get(variable) or f"~/.aws/{name}").expanduser().resolve()
