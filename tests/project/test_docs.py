"""README.md and the pages below docs/ hold: their code runs against a real daemon and S3 server, and nothing a
user can set or meet is missing in them."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import io
import re
import shlex
import sys
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from PIL import Image

from cachesvc.__main__ import run
from cachesvc.catalog.formats.all_formats import FORMATS
from cachesvc.catalog.options import Options
from cachesvc.cli import cli
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError
from loader import DataLoader, open_dataset
from testbed import ROOT
from testbed.node import Daemon
from testbed.servers import SeaweedFS, free_ports, two_ports
from tests.support.waiting import wait_until

PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("training", "data", "operating")))
TEXT = "\n".join(page.read_text() for page in PAGES)
PETS = 60
METRICS_S = 10.0


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


def sides(diff: str) -> tuple[str, str]:
    """The script before and after the change that a diff block shows."""
    lines = diff.splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if line[:1] in ("", " ", mark)) for mark in ("-", "+")
    )
    return before, after


def commands() -> list[list[str]]:
    """The command lines of the shell blocks."""
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", "").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def verb_lines(*verbs: str) -> list[list[str]]:
    """The arguments of `cachesvc`, of these verbs only where any are given."""
    found = [words[1:] for words in commands() if words[0] == "cachesvc"]
    return [words for words in found if not verbs or words[0] in verbs]


def picture(rng: np.random.Generator) -> bytes:
    """A JPEG of noise, of more than the 900 bytes that docs/training.md takes of each."""
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(file, "jpeg", quality=95)
    assert len(file.getvalue()) > 900
    return file.getvalue()


@pytest.fixture(scope="module")
def data(s3_server: SeaweedFS) -> SeaweedFS:
    """s3://bucket/ as the README has it: two classes of files, and a file of tokens."""
    client = s3_server.client()
    s3_server.create_bucket("bucket")
    rng = np.random.default_rng(0)
    for number in range(PETS):
        key = f"pets/{'cat' if number % 2 else 'dog'}/{number:03d}.jpg"
        client.put_object(Bucket="bucket", Key=key, Body=picture(rng))
    tokens = rng.integers(0, 50_000, 100_000, np.uint16)
    client.put_object(Bucket="bucket", Key="text/tokens.bin", Body=tokens.tobytes())
    client.put_object(Bucket="bucket", Key="lines/a.txt", Body=b"a line of text\n" * 20)
    chats = b"".join(
        b'{"messages": [{"role": "user", "content": "hi"}], "source": "%s"}\n' % s for s in (b"web", b"a")
    )
    client.put_object(Bucket="bucket", Key="chats/train.jsonl", Body=chats)
    return s3_server


@pytest.fixture(scope="module")
def daemon(data: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that alone holds the credentials, with everything on that the README tells of."""
    root = tmp_path_factory.mktemp("readme")
    (root / "nvme").mkdir()
    (port,) = free_ports(1)
    member = f"127.0.0.1:{two_ports()}"
    options = ["--ram", "64MiB", "--nvme", f"{root / 'nvme'}=64MiB", "--allow", "s3://bucket/"]
    options += ["--extent-bytes", "64KiB", "--fillers", "1", "--metrics", f"127.0.0.1:{port}"]
    options += ["--cluster", f"static:{member}", "--advertise", member]
    with Daemon(root / "node", options, data.env()) as found:
        (root / "node" / "port").write_text(str(port))
        with Control(found.socket_dir) as control:
            wait_until(lambda: [node.state for node in control.nodes().nodes] == ["present"])
        yield found


@pytest.fixture
def client(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds the daemon, and has no credentials."""
    monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


class ImageFolder:
    """Stands in for torchvision's, which needs the build of torch that it was made for."""

    def __init__(self, root: str, transform: Callable[[Image.Image], Any]) -> None:
        self.transform = transform
        self.files = sorted(Path(root).glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file = self.files[index]
        return self.transform(Image.open(file).convert("RGB")), self.classes.index(file.parent.name)


def test_the_script_before_the_change_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for number in range(PETS):
        file = tmp_path / ("cat" if number % 2 else "dog") / f"{number:03d}.jpg"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(picture(rng))
    datasets = types.ModuleType("torchvision.datasets")
    datasets.ImageFolder = ImageFolder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    (diff,) = blocks("diff")
    before, after = sides(diff)
    assert [line for line in after.splitlines() if line not in before.splitlines()] == [
        "from cachesvc.torch import DataLoader, ImageFolder",
        'pets = ImageFolder("s3://bucket/pets/", transform=pixels)',
    ]
    names: dict[str, Any] = {"__name__": "before"}
    exec(compile(before.replace("/data/pets", str(tmp_path)), "README.md", "exec"), names)
    assert names["images"].shape == (PETS - 32, 64, 64, 3)


def test_the_python_blocks_run_one_after_another(client: None) -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    (diff,) = blocks("diff")
    exec(compile(sides(diff)[1], "README.md", "exec"), names)
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
        with cli.all_commands()["serve"].make_context("serve", words[1:]) as context:
            assert context.params["allow"]


def test_users_are_asked_for_no_other_program_than_pip() -> None:
    fresh_machine = {"sudo", "git", "make", "python3"}
    assert {words[0] for words in commands()} == {"pip", "cachesvc"} | fresh_machine


def test_every_target_of_make_is_documented() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)
    text = TEXT + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.M))
    assert named == set(phony.split()) - {"suite", "clean"}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, as GitHub spells them in links."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        named = page.parent / target if target else page
        assert named.exists(), target
        assert not anchor or anchor in anchors(named), (target, anchor)


def test_every_promise_of_the_readme_names_its_tests() -> None:
    readme, faults = (
        (ROOT / name).read_text().partition("## Promises")[2].partition("\n## ")[0]
        for name in ("README.md", "docs/faults.md")
    )
    rows = [re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.M)[1:] for text in (readme, faults)]
    assert [promise for promise, _ in rows[0]] == [promise for promise, _ in rows[1]] != []
    assert [promise for promise, tests in rows[1] if "test_" not in tests] == []


def test_every_test_that_the_faults_name_exists() -> None:
    named = set(re.findall(r"`([\w/]*test_\w+(?:\.py)?)`", (ROOT / "docs" / "faults.md").read_text()))
    modules = {str(path.relative_to(ROOT / "tests")): path for path in (ROOT / "tests").rglob("test_*.py")}
    functions = "\n".join(path.read_text() for path in modules.values())
    assert len(named) > 50
    assert [name for name in named if name not in modules and f"def {name}" not in functions] == []


def test_every_file_that_a_page_names_exists() -> None:
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py")]
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        named = re.findall(r"`([a-z][a-z0-9_/]*\.py)`", page.read_text())
        absent = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
        assert absent == [], page.name


def test_every_folder_is_a_room_of_the_architecture() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    tops = [ROOT / name for name in ("cachesvc", "loader")]
    rooms = [file.parent.relative_to(top) for top in tops for file in top.rglob("__init__.py")]
    assert [str(room) for room in rooms if str(room) != "." and f"| `{room}/` |" not in page] == []


def test_the_architecture_draws_the_layers_that_are_enforced() -> None:
    """The page draws the layers of the two packages; contracts alone state those of the rooms inside them."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    whole = r'^containers = \["\w+"\]\nexhaustive = true\nlayers = \[(.*)\]$'
    layers = re.findall(whole, (ROOT / "pyproject.toml").read_text(), re.M)
    assert len(layers) == 2
    named = [name for line in layers for name in re.findall(r'"([^"]+)"', line)]
    assert [name for name in named if not re.search(rf"(^| ) *{re.escape(name)}( |$)", page, re.M)] == []


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    assert [path.name for path in folder.glob("20*.md") if f"({path.name})" not in index] == []


def test_a_decision_has_at_most_200_words() -> None:
    records = (ROOT / "docs" / "decisions").glob("20*.md")
    counts = {path.name: len(re.findall(r"\S*\w\S*", path.read_text())) for path in records}
    assert {name: count for name, count in counts.items() if count > 200} == {}


def test_code_cites_no_document_that_is_not_here() -> None:
    text = "\n".join(
        path.read_text()
        for folder in ("cachesvc", "loader", "bench", "testbed", "proto", "deploy")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".proto", ".yaml", ".service", ".env")
    )
    cited = set(re.findall(r"(?<![\w/.])(?:docs/[\w/.-]+|[A-Z]+)\.md\b", text))
    assert [name for name in cited if not (ROOT / name).exists()] == []
    assert re.findall(r"[Dd]esign,? (?:section \d+|D\d+)", text) == []


def test_every_verb_and_every_option_of_serve_is_documented() -> None:
    assert isinstance(cli, click.Group)
    assert [verb for verb in cli.all_commands() if f"`{verb}`" not in TEXT] == []
    options = [name for option in cli.all_commands()["serve"].params for name in option.opts]
    assert [name for name in options if not re.search(rf"^\| `{name}[ `]", TEXT, re.M)] == []


def test_every_variable_that_is_read_is_documented() -> None:
    sources = [
        path.read_text() for package in ("cachesvc", "loader") for path in (ROOT / package).rglob("*.py")
    ]
    read = {name for text in sources for name in re.findall(r"[\"'](CACHESVC(?:_[A-Z_]+)?)[\"']", text)}
    assert isinstance(cli, click.Group)
    read |= {
        str(option.envvar) for verb in cli.all_commands().values() for option in verb.params if option.envvar
    }
    assert {"CACHESVC", "CACHESVC_RAM", "CACHESVC_LOG"} <= read
    assert [name for name in sorted(read) if not re.search(rf"^\|.*`{name}`", TEXT, re.M)] == []


def test_every_error_stands_in_the_table_with_its_code() -> None:
    kinds: list[type[CacheError]] = [CacheError, *CacheError.__subclasses__()]
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
