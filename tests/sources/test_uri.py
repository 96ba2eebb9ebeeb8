"""URIs as users type them, and as attackers do."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.files import FilesSource
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.uri import MAX_EXPANDED, allowlist, canonical, expand, expanded, glob, has_glob


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("S3://Bucket/Key/", "s3://Bucket/Key/"),
        ("s3://b", "s3://b"),
        ("s3://b/a%20b", "s3://b/a%20b"),
        ("/data//x/", "file:///data/x/"),
        ("file:///data/x", "file:///data/x"),
        ("File://localhost/data/x", "file:///data/x"),
        ("/a/../b", "file:///b"),
        ("memory://m/x", "memory://m/x"),
    ],
)
def test_canonical_form(typed: str, meant: str) -> None:
    assert canonical(typed) == meant
    assert canonical(meant) == meant


@pytest.mark.parametrize(
    "trick",
    [
        "", "s3://", "s3:///k", "s3://b/../c", "s3://b/./c", "s3://b//c", "s3://b/%2e%2e/c", "s3://b/a%2Fb",
        "s3://b/a\\b", "s3://b/a\nb", "s3://b/a\x00b", "s3://b/c//", "file:///a/../etc", "file:///a/%2e%2e/b",
        "s3://b/" + "x" * 5000, "/data/\udcff", "s3://b/\ud800/",
    ],
)  # fmt: skip
def test_tricks_are_refused(trick: str) -> None:
    with pytest.raises(InvalidInput):
        canonical(trick)


@pytest.mark.parametrize("typed", ["s3:/bucket/x", str(Path("s3://bucket/x/")), "file:/data"])
def test_a_uri_with_one_slash_is_not_a_relative_path(typed: str) -> None:
    with pytest.raises(InvalidInput, match="not as a Path"):
        canonical(typed)


@given(st.text(alphabet="s3:/.%2eEfF\\ab*{}?,0", max_size=24))
def test_canonical_is_a_fixed_point_without_dot_segments(text: str) -> None:
    try:
        found = canonical("s3://b/" + text)
    except InvalidInput:
        return
    assert canonical(found) == found
    assert not {".", ".."} & set(found.split("/"))


def test_the_allowlist_ends_at_segments() -> None:
    allowed = allowlist(["s3://bucket/train", "s3://other/"])
    for fine in ("s3://bucket/train", "s3://bucket/train/x", "S3://other/y", "s3://other"):
        assert allowed.check(fine)
    for wrong in ("s3://bucket/train2", "s3://bucket", "s3://bucket2/train", "s3://other2/", "file:///etc"):
        with pytest.raises(NotAllowed, match="allowed prefix"):
            allowed.check(wrong)


def test_links_do_not_lead_out_of_the_allowlist(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_bytes(b"s")
    (tmp_path / "in" / "fine").write_bytes(b"f")
    os.symlink(tmp_path / "out", tmp_path / "in" / "door")
    os.symlink(tmp_path / "out" / "secret", tmp_path / "in" / "window")
    os.symlink(tmp_path / "in", tmp_path / "in" / "loop")
    allowed = allowlist([str(tmp_path / "in")])
    with pytest.raises(NotAllowed):
        allowed.check(f"{tmp_path}/in/door/secret")
    with pytest.raises(NotAllowed):
        allowed.check(f"{tmp_path}/in/door/*")
    source = FilesSource(allowed.roots)
    uri = allowed.check(f"{tmp_path}/in/")
    assert [v.uri for v in source.list(uri)] == [uri + "fine"]
    for path in ("door/secret", "window"):
        with pytest.raises(NotAllowed):
            source.head(uri + path)
        with pytest.raises(NotAllowed):
            source.read_into(ObjectVersion(uri + path, 1, ""), 0, memoryview(bytearray(1)))


def test_brace_ranges() -> None:
    assert expand(["s3://b/{008..011}.tar"]) == [f"s3://b/{n:03d}.tar" for n in range(8, 12)]
    assert expand(["x{2..0}-{a,b}", "{y,z}"]) == ["x2-a", "x2-b", "x1-a", "x1-b", "x0-a", "x0-b", "y", "z"]
    assert expand(["plain"]) == ["plain"]
    assert expand(["{{a,b}}", "{7..7}" * 600]) == ["{a}", "{b}", "7" * 600]
    assert expand(["{}", "v{2}", "{0-3}{a,b}"]) == ["{}", "v{2}", "{0-3}a", "{0-3}b"]
    for wrong in ("{0..999999999}", "{0..999}{0..999}", "{0..99}" * 500):
        with pytest.raises(InvalidInput):
            expand([wrong])


def test_the_expansion_of_all_uris_together_is_bounded() -> None:
    bomb = [f"s3://b/{{00000..99999}}{number}" for number in range(400)]
    assert len(expand(bomb[:1])) == MAX_EXPANDED
    long = ["s3://b/" + "x" * 3000 + "{00000..99999}"]
    for wrong in (bomb[:2], bomb, [*bomb[:1], "s3://b/one"], long):
        tracemalloc.start()
        try:
            with pytest.raises(InvalidInput, match=r"stands for 100,000 objects.*all URIs together"):
                expand(wrong)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("out", ["{..,..}/a/x", "{.,..}/x", "a{/,//}../x", "{%2,%2}e./x", "d/{..,.}"])
def test_braces_that_expand_outside_the_allowlist_are_refused_before_any_lookup(
    tmp_path: Path, out: str
) -> None:
    """They are refused before any lookup: no source is opened."""
    (tmp_path / "b" / "d").mkdir(parents=True)
    (tmp_path / "b" / "a").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"secret")
    for head in (f"{tmp_path}/b/", "nobody-reads-this://bkt/"):
        said = []
        for typed in (out, out.replace("x", "none")):
            with pytest.raises(InvalidInput) as caught:
                Sources(SourceSettings()).expand([allowlist([head]).check(head + typed)])
            said.append(str(caught.value).replace("none", "x"))
        assert said[0] == said[1]
        assert "nobody reads" not in said[0]


@pytest.mark.parametrize("other", [".DS_Store", "_SUCCESS", ".cachesvc-catalog.lmdb", ".git/config"])
@pytest.mark.parametrize("pattern", ["*", "**", "**/*"])
def test_a_glob_ignores_what_a_listing_ignores(tmp_path: Path, pattern: str, other: str) -> None:
    for name in ("a.jpg", "b.jpg", other):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    sources = Sources(SourceSettings())
    uris = sources.expand([f"{tmp_path}/{pattern}"])
    assert [uri.rpartition("/")[2] for uri in uris] == ["a.jpg", "b.jpg"]
    assert len(survey(uris, Options(), sources).entries) == 2


def test_globs_do_not_cross_slashes_but_double_stars_do(tmp_path: Path) -> None:
    for key in ("a/1.tar", "a/2.tar", "a/10.tar", "a/x.txt", "b/1.tar", "a/c/1.tar", "a/[1].tar"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"x")
    root = f"file://{tmp_path}/"

    def found(pattern: str) -> list[str]:
        assert has_glob(pattern)
        return [v.uri.removeprefix(root) for v in glob(FilesSource(), root + pattern)]

    assert found("a/?.tar") == ["a/1.tar", "a/2.tar"]
    assert found("a/*.tar") == ["a/1.tar", "a/10.tar", "a/2.tar", "a/[1].tar"]
    assert found("*/1.tar") == ["a/1.tar", "b/1.tar"]
    assert found("**/1.tar") == ["a/1.tar", "a/c/1.tar", "b/1.tar"]
    assert found("a/[!1].tar") == ["a/2.tar"]
    assert found("a/[1-2].tar") == ["a/1.tar", "a/2.tar"]
    assert found("a/**") == ["a/1.tar", "a/10.tar", "a/2.tar", "a/[1].tar", "a/c/1.tar", "a/x.txt"]


NAMES = ("run[1]", "run1", "v{2}", "x{a,b}", "xa", "q[", "w]", "s*t", "sat")


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.bin").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("run[1]/", ["run[1]/"]),  # the folder of this name, and not `run1`
        ("run[1]/0.bin", ["run[1]/0.bin"]),
        ("run[1]/*.bin", ["run1/0.bin"]),
        ("run[[]1]/*.bin", ["run[1]/0.bin"]),
        ("run[[]1]", ["run[1]"]),
        ("run[0-9]/*", ["run1/0.bin"]),
        ("v{2}/", ["v{2}/"]),
        ("v{2}/*.bin", ["v{2}/0.bin"]),
        ("v[{]2[}]/{0,1}.bin", ["v{2}/0.bin", "v{2}/1.bin"]),
        ("x{a,b}/", ["x{a,b}/"]),
        ("x{a,c}/", ["xa/", "xc/"]),
        ("x[{]a,b}/0.bin", ["x{a,b}/0.bin"]),
        ("q[/", ["q[/"]),
        ("w]/0.bin", ["w]/0.bin"]),
        ("s[*]t/0.bin", ["s*t/0.bin"]),
        ("s*t/0.bin", ["s*t/0.bin", "sat/0.bin"]),
        ("[rs]*[1t]/0.*", ["run1/0.bin", "s*t/0.bin", "sat/0.bin"]),
    ],
)
def test_names_with_marks_of_patterns(marked: Path, typed: str, found: list[str]) -> None:
    root = f"file://{marked}/"
    assert expanded([root + typed], lambda _: FilesSource()) == [root + each for each in found]


def test_a_class_that_matches_nothing_says_how_to_write_the_bracket(marked: Path) -> None:
    with pytest.raises(NotFound, match=r"run\[7\]/ matches no object; \[\[\] stands for"):
        expanded([f"file://{marked}/run[7]/"], lambda _: FilesSource())


def test_a_folder_named_like_a_pattern_is_opened_below_an_allowed_prefix(marked: Path) -> None:
    typed = [f"{marked}/run[1]/", f"{marked}/v{{2}}/"]
    allowed = allowlist([f"{marked}/"])
    sources = Sources(SourceSettings())
    uris = sources.expand([allowed.check(each) for each in typed])
    assert uris == [f"file://{each}" for each in typed]
    found = survey(uris, Options(format="files"), sources).entries
    assert [entry.object.uri for entry in found] == [f"{uri}0.bin" for uri in uris]


@pytest.mark.parametrize("uri", ["ftpx://h/x"])
def test_an_unknown_scheme_is_one_clear_line(uri: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Sources(SourceSettings())(uri)
    assert isinstance(caught.value, CacheError)
    assert "\n" not in str(caught.value)
