"""Errors for a prefix that holds nothing suggest a similar name."""

from __future__ import annotations

import uuid

import pytest

from cachesvc.core.errors import NotFound
from cachesvc.sources.near_names import allowed_hint, hint, near
from cachesvc.sources.open import Sources, SourceSettings
from testbed.servers import SeaweedFS

NAMES = ["pets/", "imagenet/", "imagenet-val/", "README.md"]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("pet", "pets/"),
        ("Pets", "pets/"),
        ("pest", "pets/"),
        ("imagenet_val", "imagenet-val/"),
        ("image", "imagenet/"),
        ("readme.md", "README.md"),
        ("text", ""),
        ("", ""),
        ("p", ""),
    ],
)
def test_a_name_that_is_like_the_typed_one_is_found(typed: str, meant: str) -> None:
    assert near(typed, NAMES) == meant


@pytest.mark.pure
def test_a_name_that_a_user_may_not_learn_is_left_out() -> None:
    text = hint("s3://b/pet holds no data", "s3://b/pets/")
    assert text == "s3://b/pet holds no data; did you mean `s3://b/pets/`?"
    assert allowed_hint(text, lambda uri: uri == "s3://b/pets/") == text
    assert allowed_hint(text, lambda uri: False) == "s3://b/pet holds no data"
    assert allowed_hint("another error", lambda uri: False) == "another error"


def test_an_empty_prefix_of_a_bucket_names_the_one_that_was_meant(
    s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str
) -> None:
    for key in ("pets/0.bin", "deep/train/0.bin", "note.txt"):
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=b"x")
    source = Sources(SourceSettings())(f"s3://{bucket}/")
    for typed, meant in {
        "Pets/": "pets/",
        "pet": "pets/",
        "deep/trian/": "deep/train/",
        "notes.txt": "note.txt",
    }.items():
        with pytest.raises(NotFound, match=f"{typed} holds no data; did you mean `s3://{bucket}/{meant}`"):
            list(source.list(f"s3://{bucket}/{typed}"))
    assert list(source.list(f"s3://{bucket}/{uuid.uuid4().hex}/")) == []
    assert len(list(source.list(f"s3://{bucket}/pets"))) == 1
