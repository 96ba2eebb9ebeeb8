"""README.md and the pages below docs/ hold: their code runs against a real daemon and S3 server, and nothing a
user can set or meet is missing in them."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch

from cachesvc.__main__ import run
from cachesvc.catalog.build import Options
from cachesvc.catalog.choice import SELECT as FORMATS
from cachesvc.cli import cli
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError
from loader import DataLoader, open_dataset
from testbed import ROOT
from testbed.node import Daemon
from testbed.servers import SeaweedFS, free_ports
from tests.support.waiting import wait_until

PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("training", "data", "operating")))
TEXT = "\n".join(page.read_text() for page in PAGES)
PETS = 60
METRICS_S = 10.0


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


def commands() -> list[list[str]]:
    """The command lines of the shell blocks."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def verb_lines(*verbs: str) -> list[list[str]]:
    """The arguments of `cachesvc`, of these verbs only where any are given."""
    found = [words[1:] for words in commands() if words[0] == "cachesvc"]
    return [words for words in found if not verbs or words[0] in verbs]


@pytest.fixture(scope="module")
def data(s3_server: SeaweedFS) -> SeaweedFS:
    """s3://bucket/ as the README has it: two classes of files, and a file of tokens."""
    client = s3_server.client()
    s3_server.create_bucket("bucket")
    rng = np.random.default_rng(0)
    for number in range(PETS):
        key = f"pets/{'cat' if number % 2 else 'dog'}/{number:03d}.jpg"
        client.put_object(Bucket="bucket", Key=key, Body=rng.bytes(1000))
    tokens = rng.integers(0, 50_000, 100_000, np.uint16)
    client.put_object(Bucket="bucket", Key="text/tokens.bin", Body=tokens.tobytes())
    return s3_server


@pytest.fixture(scope="module")
def daemon(data: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that alone holds the credentials, with everything on that the README tells of."""
    root = tmp_path_factory.mktemp("readme")
    (root / "nvme").mkdir()
    (port,) = free_ports(1)
    options = ["--ram", "64MiB", "--nvme", f"{root / 'nvme'}=64MiB", "--allow", "s3://bucket/"]
    options += ["--extent-bytes", "64KiB", "--fillers", "1", "--metrics", f"127.0.0.1:{port}"]
    with Daemon(root / "node", options, data.env()) as found:
        (root / "node" / "port").write_text(str(port))
        yield found


@pytest.fixture
def client(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds the daemon, and has no credentials."""
    monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_python_blocks_run_one_after_another(client: None) -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert names["text"].via == "daemon"
    assert names["batches"].state_dict()["step"] == 1


def test_the_command_lines_run(client: None, daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    gc.collect()  # the python blocks' loaders
    with Control(daemon.socket_dir) as control:
        wait_until(lambda: control.status().readers <= 1)  # this one: nobody leases what is evicted below
    for words in verb_lines():
        if words[0] != "serve":
            assert run(words) == 0, (words, capfd.readouterr().err)


def test_serve_accepts_the_command_line_given(client: None) -> None:
    assert verb_lines("serve")
    for words in verb_lines("serve"):
        assert isinstance(cli, click.Group)
        with cli.commands["serve"].make_context("serve", words[1:]) as context:
            assert context.params["allow"]


def test_no_other_program_is_asked_for_than_pip_and_make() -> None:
    assert {words[0] for words in commands()} == {"pip", "make", "cachesvc"}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {words[1] for words in commands() if words[0] == "make"} <= targets


def anchors(page: Path) -> set[str]:
    """What a link may name on a page: its headings, as GitHub spells them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        named = page.parent / target if target else page
        assert named.exists(), target
        assert not anchor or anchor in anchors(named), (target, anchor)


def test_every_verb_and_every_option_of_serve_is_documented() -> None:
    assert isinstance(cli, click.Group)
    assert [verb for verb in cli.commands if f"`{verb}`" not in TEXT] == []
    options = [name for option in cli.commands["serve"].params for name in option.opts]
    assert [name for name in options if not re.search(rf"^\| `{name}[ `]", TEXT, re.M)] == []


def test_every_variable_that_is_read_is_documented() -> None:
    sources = [
        path.read_text() for package in ("cachesvc", "loader") for path in (ROOT / package).rglob("*.py")
    ]
    read = {name for text in sources for name in re.findall(r"[\"'](CACHESVC(?:_[A-Z_]+)?)[\"']", text)}
    assert {"CACHESVC", "CACHESVC_RAM", "CACHESVC_LOG"} <= read
    assert [name for name in sorted(read) if not re.search(rf"^\|.*`{name}`", TEXT, re.M)] == []


def test_every_error_stands_in_the_table_with_its_code() -> None:
    kinds = [CacheError, *CacheError.__subclasses__()]
    assert [kind for kind in kinds if f"| {kind.code} | `{kind.__name__}` |" not in TEXT] == []


def test_every_metric_that_the_daemon_serves_is_documented(daemon: Daemon, client: None) -> None:
    port = (daemon.root / "port").read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=METRICS_S) as answer:
        served = set(re.findall(r"^# TYPE (cachesvc_\w+)", answer.read().decode(), re.M))
    assert served == set(re.findall(r"^\| `(cachesvc_\w+)` \|", TEXT, re.M))


def test_every_format_and_dataset_option_is_documented() -> None:
    named = [*FORMATS, *(field.name for field in dataclasses.fields(Options))]
    named += [name for name in inspect.signature(open_dataset).parameters if name not in ("uri", "transform")]
    assert [name for name in named if not re.search(rf"`{name}(`|=)", TEXT)] == []


def test_every_argument_that_torch_does_not_have_is_documented() -> None:
    torchs = inspect.signature(torch.utils.data.DataLoader).parameters
    ours = [name for name in inspect.signature(DataLoader).parameters if name not in torchs]
    assert "seed" in ours
    assert [name for name in ours if not re.search(rf"^\|.*`{name}`", TEXT, re.M)] == []


def test_every_member_of_the_loader_that_torch_does_not_have_is_documented() -> None:
    ours = [name for name in vars(DataLoader) if name[0] != "_"]
    assert "accumulate" in ours
    assert [name for name in ours if not re.search(rf"^\|.*`{name}[(`]", TEXT, re.M)] == []
