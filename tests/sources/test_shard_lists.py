"""Lists joined by `::` and `pipe:` commands, as WebDataset takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import InvalidInput
from cachesvc.sources.shard_lists import spelled_uris
from loader import open_dataset
from tests.support.datasets import tar_bytes, write_files

WORDS = st.lists(
    st.sampled_from(
        ["curl", "aws", "s3", "cp", "-", "-s", "-L", "|", "cat", "::", "s3://b/x.tar", "'", "$(x)"]
    )
)


@pytest.mark.parametrize(
    ("text", "uris"),
    [
        ("s3://b/x-{000..123}.tar", ["s3://b/x-{000..123}.tar"]),
        ("a-{0..2}.tar::b.tar::s3://c/d/", ["a-{0..2}.tar", "b.tar", "s3://c/d/"]),
        ("s3://b/ns::name", ["s3://b/ns::name"]),
        ("pipe:curl -s -L https://h/x-{00..99}.tar || true", ["https://h/x-{00..99}.tar"]),
        (
            "pipe:curl --connect-timeout 30 --retry 30 -f -sL 'https://h/a b.tar?x=1'",
            ["https://h/a b.tar?x=1"],
        ),
        ("pipe:wget -q -O - https://h/x.tar", ["https://h/x.tar"]),
        ("pipe:wget -qO- https://h/x.tar", ["https://h/x.tar"]),
        ("pipe:aws s3 cp s3://b/{0..9}.tar -", ["s3://b/{0..9}.tar"]),
        ("pipe:aws s3 cp --quiet s3://b/x.tar - 2> /dev/null", ["s3://b/x.tar"]),
        ("pipe:gsutil cat gs://b/x.tar", ["gs://b/x.tar"]),
        ("pipe:gcloud storage cat gs://b/x.tar", ["gs://b/x.tar"]),
        ("pipe:s5cmd cat s3://b/x.tar", ["s3://b/x.tar"]),
        ("pipe:cat /data/x.tar", ["/data/x.tar"]),
        ("pipe:aws s3 cp s3://b/x.tar -::pipe:cat y.tar", ["s3://b/x.tar", "y.tar"]),
    ],
)
def test_lists_and_commands_become_uris(text: str, uris: list[str]) -> None:
    assert spelled_uris(text) == uris


@pytest.mark.parametrize(
    ("pipe", "says"),
    [
        ("pipe:curl -H 'Authorization: x' https://h/x.tar", "has '-H'"),
        ("pipe:curl https://h/x.tar | zcat", "more than one plain command"),
        ("pipe:curl $(cat list)", "more than one plain command"),
        ("pipe:curl https://h/a.tar https://h/b.tar", "has 'https://h/b.tar'"),
        ("pipe:aws s3 cp s3://b/x.tar /tmp/x", "another target than -"),
        ("pipe:aws s3 cp s3://b/x.tar - --endpoint-url http://m", "another target than -"),
        ("pipe:wget https://h/x.tar", "no -O -"),
        ("pipe:hdfs dfs -cat /x.tar", "runs 'hdfs'"),
        ("pipe:", "more than one plain command"),
        ("pipe:curl 'unclosed", "more than one plain command"),
    ],
)
def test_other_commands_are_refused_by_name(pipe: str, says: str) -> None:
    with pytest.raises(InvalidInput, match="commands are not run") as caught:
        spelled_uris(pipe)
    assert says in str(caught.value)
    assert repr(pipe) in str(caught.value)


@given(st.text() | WORDS.map(lambda words: "pipe:" + " ".join(words)))
def test_any_text_is_a_list_or_a_typed_error(text: str) -> None:
    try:
        found = spelled_uris(text)
    except InvalidInput:
        assert "pipe:" in text
    else:
        assert found


def test_a_dataset_opens_from_a_list_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_files(tmp_path / "d", {f"{n}.tar": tar_bytes({f"k{n}": {"txt": b"%d" % n}}) for n in range(4)})
    data = open_dataset(f"pipe:cat {tmp_path}/d/{{0..2}}.tar::{tmp_path}/d/3.tar", fields=("txt",))
    assert sorted(data) == [(str(n),) for n in range(4)]
