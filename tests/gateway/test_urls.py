"""URLs of the file system, and the URIs that they stand for."""

from __future__ import annotations

import fsspec
import pytest

from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.gateway.filesystem import CachedFileSystem
from cachesvc.gateway.urls import opens_by_name, stripped, uri_of

PAIRS = [
    ("cachesvc://s3/bucket/a/key.parquet", "s3://bucket/a/key.parquet"),
    ("cachesvc://gs/bucket/key", "gs://bucket/key"),
    ("cachesvc://az/container/key", "az://container/key"),
    ("cachesvc://hf/datasets/owner/name/x.parquet", "hf://datasets/owner/name/x.parquet"),
    ("cachesvc://https/host/x.csv?part=1", "https://host/x.csv?part=1"),
    ("cachesvc://file/data/x.parquet", "file:///data/x.parquet"),
]


@pytest.mark.parametrize(("url", "uri"), PAIRS)
def test_a_url_names_the_scheme_of_the_source_first(url: str, uri: str) -> None:
    assert uri_of(stripped(url)) == uri
    assert f"cachesvc://{stripped(uri)}" == url


@pytest.mark.parametrize("url", ["cachesvc://s3://bucket/key/", "s3://bucket/key", "s3/bucket/key"])
def test_the_uri_of_a_source_is_taken_too(url: str) -> None:
    assert stripped(url) == "s3/bucket/key"


def test_an_absolute_path_is_a_local_file() -> None:
    assert (
        stripped("/data/x") == stripped("cachesvc:///data/x") == stripped("file:///data/x") == "file/data/x"
    )


@pytest.mark.parametrize("url", ["cachesvc://", "cachesvc://s3", "cachesvc://file/"])
def test_a_url_without_a_bucket_or_file_is_not_found(url: str) -> None:
    with pytest.raises(NotFound, match="cachesvc://s3/bucket/key"):
        uri_of(stripped(url))


@pytest.mark.parametrize("path", ["s3/bucket/../other/key", "s3/bucket/a/./b", "file/data/../x"])
def test_a_url_with_dots_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    with pytest.raises(InvalidInput, match="segment"):
        CachedFileSystem(skip_instance_cache=True).info(path)


def test_a_key_may_hold_what_no_dataset_is_named_by() -> None:
    assert uri_of("s3/bucket/a//b\\c") == "s3://bucket/a//b\\c"
    assert uri_of("s3/bucket/a//") == "s3://bucket/a"


def test_names_that_no_dataset_can_have_are_told_from_others() -> None:
    names = ("a", "a*", "a?", "a[1]", "{a,b}", "a//b", "a\\b", "a\tb")
    assert [opens_by_name(f"s3://bucket/{name}") for name in names] == [True] + 7 * [False]
    assert opens_by_name("https://host/x?part=[1]")


def test_fsspec_finds_the_file_system_by_its_protocol() -> None:
    assert fsspec.get_filesystem_class("cachesvc") is CachedFileSystem


def test_names_of_a_chain_lack_the_scheme_that_the_chain_states() -> None:
    chained = CachedFileSystem(target_protocol="s3")
    assert chained.unstrip_protocol("bucket/key") == "cachesvc://s3/bucket/key"
    older = CachedFileSystem(target_protocol="s3", fo="bucket/key")
    assert older.unstrip_protocol("") == "cachesvc://s3/bucket/key"
    local = CachedFileSystem(target_protocol="file")
    assert local.unstrip_protocol("/data/x") == "cachesvc://file/data/x"


@pytest.mark.parametrize(
    "name", ["mkdir", "makedirs", "rm", "rm_file", "rmdir", "touch", "pipe_file", "put", "cp_file", "mv"]
)
def test_the_file_system_is_read_only(name: str) -> None:
    with pytest.raises(PermissionError, match="read-only: write s3/bucket/key at its source"):
        getattr(CachedFileSystem(), name)("s3/bucket/key", "other")


@pytest.mark.parametrize("mode", ["wb", "ab", "r+b", "xb", "w"])
def test_no_file_opens_for_writing(mode: str) -> None:
    with pytest.raises(PermissionError, match="read-only"):
        CachedFileSystem().open("cachesvc://s3/bucket/key", mode)
