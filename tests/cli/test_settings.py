"""Options, variables and exit codes of the command line, without a daemon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.__main__ import run
from cachesvc.cli import cli, output
from cachesvc.cli.estimate import Cluster, forecast
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.cli.serve import serve, settings_of
from cachesvc.config import NvmeSpec, parse_size, size_text
from cachesvc.core import errors
from testbed import WAIT_S


def parsed(arguments: list[str]) -> Any:
    context = serve.make_context("serve", arguments)
    context.params.pop("json")
    return settings_of(**context.params)


def verbs() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command


def test_serve_options_become_settings() -> None:
    budgets = "--ram 2GiB --nvme /a=10GB --nvme /b=80%,mounted --allow s3://x/ --allow /data"
    places = "--socket /run/x --state-dir /s --listen 127.0.0.1:9000 --metrics 127.0.0.1:9090"
    others = "--extent-bytes 1MiB --socket-mode 660 --fillers 3 --log-format json --unplanned-share 0.05 --hedge 3%"
    others += " --stale-if-error 90m"
    found = parsed(f"{budgets} {places} {others}".split())
    assert found.ram_bytes == 2 << 30
    assert found.nvme == (NvmeSpec("/a", 10 * 10**9), NvmeSpec("/b", share=0.8, mounted=True))
    assert found.allow == ("s3://x/", "/data")
    assert (found.socket_dir, found.state_dir, found.listen) == ("/run/x", "/s", "127.0.0.1:9000")
    assert found.stale_if_error_s == 5400
    assert (found.metrics, found.extent_bytes, found.socket_mode) == ("127.0.0.1:9090", 1 << 20, 0o660)
    assert (found.fillers, found.log_format, found.unplanned_share, found.hedge_share) == (
        3,
        "json",
        0.05,
        0.03,
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--node-name", "a"),
        ("--advertise", "127.0.0.1:7070"),
        ("--zone", "z"),
        ("--domain", "zone"),
        ("--rejoin-grace", "0"),
        ("--cluster-wait", "0"),
        ("--peer-bandwidth", "0"),
        ("--tls-name", "peers"),
        ("--compare-peers", "0.5"),
    ],
)
def test_an_option_of_a_cluster_needs_one(option: str, value: str) -> None:
    with pytest.raises(errors.InvalidInput, match=f"{option} is of a cluster; give --cluster too"):
        parsed([option, value])
    parsed(["--cluster", "static:127.0.0.1:7070", option, value])


def test_serve_takes_every_option_from_a_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC_RAM", "1G")
    monkeypatch.setenv("CACHESVC_NVME", "/a=1G /b=50%")
    monkeypatch.setenv("CACHESVC_ALLOW", "s3://x/ s3://y/")
    monkeypatch.setenv("CACHESVC_SOCKET", "/run/y")
    monkeypatch.setenv("CACHESVC_CLUSTER", "static:node[1-2]:7070")
    monkeypatch.setenv("CACHESVC_NODE_NAME", "node1")
    found = parsed([])
    assert found.ram_bytes == 1 << 30
    assert found.cluster is not None
    assert (found.cluster.members, found.cluster.advertise) == ("static:node[1-2]:7070", "node1:7070")
    assert found.nvme == (NvmeSpec("/a", 1 << 30), NvmeSpec("/b", share=0.5))
    assert found.allow == ("s3://x/", "s3://y/")
    assert found.socket_dir == "/run/y"
    for option in serve.params:
        assert option.name in ("json", "help") or option.envvar == f"CACHESVC_{str(option.name).upper()}"


@pytest.mark.parametrize(
    "arguments",
    [
        "--ram lots",
        "--stale-if-error tomorrow",
        "--stale-if-error 1w",
        "--stale-if-error -1h",
        "--ram -5",
        "--ram 9999999999999999P",
        f"--ram {'9' * 400}",
        f"--ram {'9' * 5000}",
        f"--nvme /a={'9' * 5000}",
        f"--quota user:{'9' * 5000}=1G",
        f"--allow /data=uid:{'9' * 5000}",
        f"--listen 127.0.0.1:{'9' * 5000}",
        "--socket /run/\udcff",
        "--ram ²GiB",
        "--quota user:²=1G",
        "--quota users=1G",
        "--quota user:=1G",
        "--quota data/=1G",
        "--allow /data=uid:²",
        "--metrics 127.0.0.1:²",
        "--nvme /a",
        "--nvme /a=200%",
        "--nvme =5G",
        "--nvme /a=5G,mount",
        "--nvme /a=5G,",
        "--nvme /a=mounted",
        "--nvme /a=0",
        "--nvme /a=1MiB",
        "--nvme /a=1GiB --nvme /a/=1GiB",
        "--unplanned-share 0.6",
        "--unplanned-share -0.1",
        "--unplanned-share nan",
        "--unplanned-share 5%",
        "--hedge 0.02",
        "--hedge 101%",
        "--ram 64MiB --unplanned-share 0.5",
        "--s3-writes s3://x/",
        "--s3 127.0.0.1:9000 --s3-writes /data",
        "--s3 127.0.0.1:9000 --s3-writes s3://x/=uid:nobody-of-this-name",
        "--s3 127.0.0.1:9000 --s3-fresh soon",
        "--s3 127.0.0.1:9000 --s3-part 5000",
        "--s3 127.0.0.1:9000 --source s3://x/,endpoint=http://localhost:9000",
        "--socket-mode 999",
        "--socket-mode 7777",
        "--listen 8080",
        "--listen host:99999",
        "--ram 1MiB --extent-bytes 64MiB",
        "--socket-mode 666",
        "--extent-bytes 5000",
        "--listen 0.0.0.0:9000",
        "--share 0.0.0.0:9000",
        "--peer 10.1.1.1:9000",
        "--peer node2",
        "--tls-cert x.pem",
        "--nonsense",
    ],
)
def test_serve_refuses_invalid_options_with_2(
    capsys: Any, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CACHESVC_ALLOW", "CACHESVC_NVME"):
        monkeypatch.delenv(name, raising=False)
    assert run(["serve", *arguments.split()]) == 2
    assert capsys.readouterr().err.strip()


@pytest.mark.parametrize("option", ["--metrics", "--listen", "--advertise"])
@pytest.mark.parametrize("given", ["https://node2:9000", "unix:/run/x:9000", "node 2:9000"])
def test_an_address_is_not_a_url(capsys: Any, option: str, given: str) -> None:
    assert run(["serve", "--tls-cert", "x", "--tls-key", "x", "--tls-ca", "x", option, given]) == 2
    assert f"{given!r} is not an address; write HOST:PORT" in capsys.readouterr().err


def test_every_verb_prints_json_on_demand_and_every_option_is_explained() -> None:
    for name, command in verbs():
        options = {p.name: p for p in command.params if isinstance(p, click.Option)}
        assert "json" in options, name
        assert all(option.help for option in options.values()), name
        assert command.help


def test_exit_codes_are_documented_in_help(capsys: Any) -> None:
    codes = [kind.code for kind in errors.kinds() if kind.__module__ == errors.__name__]
    assert run(["--help"]) == 0
    listed = [int(code) for code in re.findall(r"^ +(\d+)  \w", capsys.readouterr().out, re.M)]
    assert sorted(listed) == sorted([0, errors.INTERRUPTED, *codes])


def test_the_command_line_imports_nothing_heavy_before_it_is_needed() -> None:
    heavy = ["numpy", "lmdb", "boto3", "grpc", "torch", "rich", "urllib.request"]
    code = f"import sys, cachesvc.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.strip() == "[]"


def test_a_log_gets_a_line_a_second_at_most(capsys: Any) -> None:
    clock = iter([0.0, 0.4, 0.9, 1.5, 1.6, 3.0])
    with ProgressBar("prefetch", now=lambda: next(clock)) as feedback:
        for done in range(5):
            feedback.update(done << 20, 10 << 20)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "prefetch: 20.0 %, 2.0 MiB of 10.0 MiB, 1.3 MiB/s, 0:06 left",
        "prefetch: 40.0 %, 4.0 MiB of 10.0 MiB, 1.3 MiB/s, 0:04 left",
    ]


def test_before_the_first_extent_is_there_its_rate_is_unknown(capsys: Any) -> None:
    for as_json in (False, True):
        with ProgressBar("prefetch", as_json, now=iter([0.0, 5.0, 6.0]).__next__) as feedback:
            feedback.update(1 << 20, 10 << 20)  # a part that was there before
            feedback.update(1 << 20, 10 << 20)
    said = capsys.readouterr()
    assert said.err.splitlines() == ["prefetch: 10.0 %, 1.0 MiB of 10.0 MiB"]  # nothing is said twice
    assert [json.loads(line)["bytes_per_s"] for line in said.out.splitlines()] == [None, None]


@pytest.mark.parametrize(
    "typed", ["64GiB", "500GB", "1MiB", "4KiB", "1TiB", "100KB", "5PB", "4,097 bytes", "1 bytes"]
)
def test_a_size_is_said_as_it_is_typed(typed: str) -> None:
    assert size_text(parse_size(typed.replace(",", "").replace(" bytes", ""))) == typed


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (1 << 40, "1.0 TiB")]
)
def test_sizes_are_formatted_for_people(count: int, text: str) -> None:
    assert output.size(count) == text


def test_only_the_whole_is_100_percent() -> None:
    assert output.share(9_999_999, 10_000_000) == "99.9 %"
    assert output.share(5, 5) == "100 %"
    assert output.share(0, 0) == "-"


def test_a_single_nodes_hit_rate_is_its_share_of_the_data() -> None:
    tenth = Cluster(
        nodes=8, cache_bytes=100, source_bytes_per_s=10, peer_bytes_per_s=100, local_bytes_per_s=1000
    )
    alone = forecast(1000, 10, tenth)
    assert (alone.local, alone.peer, alone.source) == pytest.approx((0.1, 0.0, 0.9))
    assert alone.epoch_s == pytest.approx(90.0)
    assert alone.bound_by == "source"


@pytest.mark.parametrize(
    ("cache_bytes", "expected"),
    [(100, (0.1, 0.7, 0.2)), (200, (0.125, 0.875, 0.0)), (1000, (1.0, 0.0, 0.0))],
)
def test_the_nodes_of_a_cluster_hit_what_all_of_them_keep(
    cache_bytes: int, expected: tuple[float, float, float]
) -> None:
    found = forecast(1000, 10, Cluster(8, cache_bytes, 10, 100, 1000), shared=True)
    assert (found.local, found.peer, found.source) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 1 << 50),
    nodes=st.integers(1, 1000),
    cache=st.integers(0, 1 << 50),
    shared=st.booleans(),
)
def test_a_forecast_accounts_for_every_read(size: int, nodes: int, cache: int, shared: bool) -> None:
    found = forecast(size, 10, Cluster(nodes, cache, 1e9, 1e9, 1e9), shared)
    assert found.local + found.peer + found.source == pytest.approx(1.0)
    assert min(found.local, found.peer, found.source) >= -1e-9
    assert found.source_bytes <= size
    assert found.cold_epoch_s >= 0
