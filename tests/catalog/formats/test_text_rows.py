"""Rows of text: where JSON, CSV and plain lines lie in their files, what types and tags they have, and what is refused."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.compiler import Inputs, ListedObject
from cachesvc.catalog.formats.object_bytes import ObjectBytes
from cachesvc.catalog.labels.row_tags import RowTags
from cachesvc.catalog.listing import BESIDE
from cachesvc.catalog.options import Options
from cachesvc.catalog.row_syntax import csv_rows, json_value
from cachesvc.catalog.validation import check_catalog
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from tests.support.catalog_reader import Folder, compiled, samples_of
from tests.support.datasets import write_files
from tests.support.folders import IMAGES, opened, refusal

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.compress,
}


def rows(catalog: Catalog) -> list[bytes]:
    check_catalog(catalog)
    return [row or b"" for (row,) in samples_of(catalog)]


def types(catalog: Catalog) -> dict[str, str]:
    return {field.name: field.encoding for field in catalog.fields}


# ---- JSON lines


@pytest.mark.parametrize("ending", COMPRESS)
def test_each_line_of_json_that_is_not_blank_is_a_sample(tmp_path: Path, ending: str) -> None:
    body = '\ufeff{"a": "ü"}\n\n  \r\n {"b": [1]} \r\n[2]\nnull\n{"a": 1}'.encode()
    catalog = opened(tmp_path / "d", {f"x.jsonl{ending}": COMPRESS[ending](body)})
    assert (catalog.format, catalog.notes, types(catalog)) == ("jsonl", (), {"a": "json", "b": "json"})
    assert [json_value(row) for row in rows(catalog)] == [{"a": "ü"}, {"b": [1]}, [2], None, {"a": 1}]
    assert [catalog.line_of(sample)[1] for sample in range(5)] == [1, 4, 5, 6, 7]
    assert catalog.key(4) == f"x.jsonl{ending}:4"


EDGES = [
    "NaN",
    "-Infinity",
    "1e400",
    '"\\ud800"',
    "-0",
    "-0.0",
    "18446744073709551616",
    "1" * 400,
    "5e-324",
    " [1] ",
]


def loaded(text: str) -> str | None:
    try:
        return repr(json.loads(text))
    except ValueError:
        return None


@given(st.text() | st.sampled_from(EDGES) | st.from_type(float).map(repr) | st.integers().map(str))
def test_a_line_of_json_is_what_the_standard_library_makes_of_it(text: str) -> None:
    for line in (text, f'{{"a": {text}, "a": {text}}}', f"[{text}, {json.dumps(text)}]"):
        expected = loaded(line)
        if expected is None:
            with pytest.raises(ValueError):
                json_value(line.encode(errors="surrogatepass"))
        else:
            assert repr(json_value(line.encode())) == expected


def test_a_schema_may_drift_over_many_files(tmp_path: Path) -> None:
    files = {f"{n // 100}/{n:04}.jsonl": b'{"n": %d, "only%d": 1}\n' % (n, n % 5) for n in range(300)}
    catalog = opened(tmp_path / "d", files)
    assert (catalog.samples, sorted(types(catalog))) == (300, ["n", *(f"only{n}" for n in range(5))])
    assert catalog.find("n >= 298").tolist() == [298, 299]
    assert len(catalog.find("only3 == 1")) == 60


def test_rows_span_extents(tmp_path: Path) -> None:
    values = [{"text": "x" * (n * 300 % 3000), "n": n} for n in range(60)]
    body = "".join(json.dumps(value) + "\n" for value in values).encode()
    catalog = opened(tmp_path / "d", {"a.jsonl": body, "b.jsonl": body}, extent_bytes=4096)
    assert len(catalog.extent_sizes) > 30
    assert [json.loads(row) for row in rows(catalog)] == values * 2
    assert catalog.key(61) == "b.jsonl:1"


@pytest.mark.parametrize("names", [("a.json",), ("x/a.json", "x/b.json"), ("a.ndjson",), ("a.json.gz",)])
def test_json_lines_of_other_names_are_recognised(tmp_path: Path, names: tuple[str, ...]) -> None:
    body = b'{"a": 1}\n{"a": 2}\n'
    files = {name: gzip.compress(body) if name.endswith("gz") else body for name in names}
    catalog = opened(tmp_path / "d", files)
    assert (catalog.format, catalog.samples) == ("jsonl", 2 * len(names))


LISTS = {
    "a list": (b'[{"a": 1}]', "a JSON list", "jq -c '.[]'"),
    "a long list": (b"\n[\n  " + b'{"a": "x"},' * 200_000 + b"{}]", "a JSON list", "jq -c '.[]'"),
    "rows at a key": (b'{"version": "1.1", "data": [{"a": 1}]}', "rows in 'data'", "jq -c '.data[]'"),
    "an odd key": (
        b'{"info": {"b": [{"a": []}]}, "none": [], "a b": [{}]}',
        "rows in 'a b'",
        "jq -c '.\"a b\"[]'",
    ),
}
"""Of files that hold rows, and are no lines."""


@pytest.mark.parametrize("case", LISTS)
def test_json_that_holds_rows_and_is_no_lines_is_told(tmp_path: Path, case: str) -> None:
    body, name, command = LISTS[case]
    error = refusal(tmp_path / "one", {"a.json": body})
    assert f"{name}, which is not read" in error
    assert command in error
    assert opened(tmp_path / "one", {}, format="files").samples == 1
    if len(body) < 1 << 20:
        catalog = opened(tmp_path / "two", {"a.json": body, "b.json": body})
        (note,) = catalog.notes
        assert (catalog.format, catalog.samples) == ("files", 2)
        assert note.startswith("each of 2 .json files is one sample")
        assert command in note


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"a": [1, 2], "b": [[{}]], "c": {"d": [{}]}}',
        b"[[1], {}]",
        b'{"text": "[{",',
        b'["[", {}]',
        b'{"text": "' + b"[" * 70_000 + b'{"}',
        b'{"text": "' + b"x" * 65_525 + b'\\"[{"}',
        b"]]]",
    ],
    ids=range(8),
)
def test_other_json_is_one_sample_without_a_note(tmp_path: Path, body: bytes) -> None:
    catalog = opened(tmp_path / "d", {"a.json": body})
    assert (catalog.format, catalog.samples, catalog.notes) == ("files", 1, ())


def test_a_catalog_beside_json_lines_is_used(tmp_path: Path) -> None:
    built = opened(tmp_path / "d", {"a.json": b'{"a": 1}\n{"a": 2}\n'})
    (catalog,) = tmp_path.glob(".*.catalog")
    catalog.rename(tmp_path / "d" / BESIDE)
    folder = Folder()
    assert compiled(tmp_path / "d", folder=folder).id == built.id
    assert {Path(read).name for read in folder.reads} == {BESIDE}


def test_short_values_are_searched_and_long_ones_are_not_in_the_catalog(tmp_path: Path) -> None:
    many = [
        {
            "id": f"ü{n}",
            "label": n % 3,
            "flag": n == 1,
            "text": "y" * 65,
            "deep": {"x": 1},
            "mix": n or "a",
            "none": None,
        }
        for n in range(10)
    ]
    catalog = opened(tmp_path / "d", {"a.jsonl": "\n".join(map(json.dumps, many)).encode()})
    assert set(catalog.names()) == {"key", "shard", "id", "label", "flag", "mix"}
    for found, expected in (
        ("id == 'ü3'", [3]),
        ("label == 2", [2, 5, 8]),
        ("flag == True", [1]),
        ("mix == 'a'", [0]),
        ("mix == 7", [7]),
        ("shard == 'a.jsonl' and key == 'a.jsonl:4'", [4]),
    ):
        assert catalog.find(found).tolist() == expected


def test_more_names_than_are_kept_are_noted(tmp_path: Path) -> None:
    body = "".join(json.dumps({"kind": f"k{n % 3}", f"n{n}": n}) + "\n" for n in range(1100))
    catalog = opened(tmp_path / "d", {"a.jsonl": body.encode()})
    assert len(catalog.find("kind == 'k1'")) == 367
    assert any("columns are not searchable" in note for note in catalog.notes)
    assert any("fields= can name the first 1,024 keys" in note for note in catalog.notes)
    assert len(catalog.fields) == 1024


@pytest.mark.parametrize("limit", [{"most_texts": 50, "pending": 4}, {"most_values": 250, "pending": 8}])
def test_columns_of_too_many_values_are_noted(limit: dict[str, int]) -> None:
    tags = RowTags(**limit)
    for at in range(100):
        tags.add_all(at, [("a", at), ("b", str(at % 2)), ("c", f"text {at}")])
    assert list(tags.columns(100)) == ["a", "b"]
    assert tags.notes() == ["1 columns are not searchable, being too many or of too many values: c"]


def inputs_of(bodies: dict[str, bytes]) -> Inputs:
    def fetch(version: ObjectVersion, offset: int, length: int) -> bytes:
        return bodies[version.uri][offset : offset + length]

    entries = [ListedObject(ObjectVersion(name, len(body), "e"), name) for name, body in bodies.items()]
    anything: Any = None
    return Inputs("", entries, Options(), fetch, anything, anything)


def test_a_file_that_was_left_in_the_middle_costs_the_next_one_nothing() -> None:
    bodies = {f"{n}.gz": gzip.compress(random.Random(n).randbytes(5000)) for n in range(3)}
    found = ObjectBytes(inputs_of(bodies), fetch_bytes=100)
    next(found.windows(0))
    next(found.windows(1))
    assert b"".join(found.windows(2)) == gzip.decompress(bodies["2.gz"])


@given(
    st.lists(
        st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists),
        max_size=20,
    )
)
@settings(max_examples=50)
def test_any_json_is_read_as_its_writer_wrote_it(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("d")
    lines = [json.dumps({"v": value}, ensure_ascii=len(values) % 2 == 0) for value in values]
    write_files(folder, {"a.jsonl": "\n".join(["[]", *lines]).encode(errors="surrogatepass")})
    found = [row.decode(errors="surrogatepass") for row in rows(compiled(folder))]
    assert found == ["[]", *lines]


# ---- CSV


def test_the_cells_of_all_files_decide_the_types(tmp_path: Path) -> None:
    files = {
        "a.csv": b"i,f,t,e,big,zero,mixed\n1,2,3,,1,007,1\n-5,1e3,x,,9007199254740993,1,1.5\n",
        "b.csv": b"f;i;new;zero\r\n.5;7;nan;2\r\n\r\n;;1.5;\r\n",
        "c.tsv": b"i\tt\n8\t5\n",
    }
    catalog = opened(tmp_path / "d", files)
    assert types(catalog) == {
        **{
            "i": "int",
            "f": "float",
            "t": "text",
            "e": "text",
            "big": "int",
            "zero": "text",
            "mixed": "float",
        },
        "new": "float",
    }
    assert catalog.format == "csv"
    assert [header.separator for header in catalog.csv_headers] == [",", ";", "\t"]
    assert catalog.headers_of(np.arange(catalog.samples)).tolist() == [0, 0, 1, 1, 2]
    assert catalog.find("i > 6").tolist() == [2, 4]
    assert types(opened(tmp_path / "e", {"a.csv": b"x\n9007199254740993\n0.5\n"})) == {"x": "text"}
    assert types(opened(tmp_path / "f", {"a.csv": b"x\n99999999999999999999\n1\n"})) == {"x": "text"}


def test_quoted_cells_span_lines(tmp_path: Path) -> None:
    body = b'\xef\xbb\xbftext,n\r\n"a, ""b""\r\nsecond",1\r\n"c\n\n",2\r\nd,3'
    catalog = opened(tmp_path / "d", {"a.csv": body, "b.csv.gz": gzip.compress(body)})
    assert rows(catalog) == [b'"a, ""b""\r\nsecond",1', b'"c\n\n",2', b"d,3"] * 2
    assert [catalog.line_of(sample)[1] for sample in range(3)] == [2, 4, 7]
    assert types(catalog) == {"text": "text", "n": "int"}


@given(
    st.lists(
        st.lists(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r")),
            min_size=2,
            max_size=2,
        )
    ),
    st.sampled_from([",", ";", "\t"]),
)
@settings(max_examples=60)
def test_any_cells_are_read_as_their_writer_wrote_them(
    tmp_path_factory: pytest.TempPathFactory, cells: list[list[str]], separator: str
) -> None:
    folder, text = tmp_path_factory.mktemp("d"), io.StringIO()
    csv.writer(text, delimiter=separator).writerows([["one", "two"], ["a", "b"], *cells])
    write_files(folder, {"a.csv": text.getvalue().encode()})
    catalog = compiled(folder)
    assert list(csv_rows([row.decode() for row in rows(catalog)], separator)) == [["a", "b"], *cells]


SEPARATED = {
    "in quotes": (b'"a;b;c",d\n1,2\n', ["a;b;c", "d"]),
    "doubled quotes": (b'"a ""b;c;d"" e",f\n1,2\n', ['a "b;c;d" e', "f"]),
    "a line end in quotes": (b'a,"b;c\n;;d"\n1,2\n', ["a", "b;c\n;;d"]),
    "bars": (b"a|b|c\n1|2,5|3\n", ["a", "b", "c"]),
    "a bar in a name": (b"a|b|c,d\n1,2\n", ["a|b|c", "d"]),
    "one column": (b"a\nx\n", ["a"]),
}
"""Tables whose separator must be found: bytes, and the names of the columns."""


@pytest.mark.parametrize("case", SEPARATED)
def test_the_separator_is_what_stands_outside_quotes(tmp_path: Path, case: str) -> None:
    body, names = SEPARATED[case]
    assert list(types(opened(tmp_path / "d", {"a.csv": body}))) == names


@pytest.mark.parametrize("separator", [";", "|", "\x01", " ", "é"])
def test_a_given_separator_holds_for_all_files(tmp_path: Path, separator: str) -> None:
    body = separator.join(["a,b", "c"]) + "\n" + separator.join(["1", "x,y,z"]) + "\n"
    files = {"a.csv": body.encode(), "b.tsv": body.encode()}
    catalog = opened(tmp_path / "d", files, separator=separator)
    assert types(catalog) == {"a,b": "int", "c": "text"}
    assert catalog.find("c == 'x,y,z'").tolist() == [0, 1]
    for wrong in (separator * 2, '"', "\n"):
        with pytest.raises(InvalidInput, match="give the one character between the cells"):
            opened(tmp_path / "d", {}, separator=wrong)
    assert "separator=';' is for csv" in refusal(tmp_path / "e", {"a.jsonl": b"{}\n{}\n"}, separator=";")


def test_a_header_of_numbers_is_noted(tmp_path: Path) -> None:
    (note,) = opened(tmp_path / "d", {"a.csv": b"3,Wall St.\n4,x\n"}).notes
    assert "columns are named '3', 'Wall St.' by the first line of" in note
    assert types(opened(tmp_path / "e", {"a.csv": b",a\n0,1\n"})) == {"Unnamed: 0": "int", "a": "int"}


def test_tables_of_labels_are_no_rows(tmp_path: Path) -> None:
    assert opened(tmp_path / "d", IMAGES | {"rows.csv": b"a\n1\n", "x.jsonl": b"{}\n"}).format == "files"
    assert opened(tmp_path / "e", {"train.csv": b"a\n1\n", "README.md": b"r"}).format == "csv"


# ---- text


def test_each_line_of_text_is_a_sample_where_the_format_is_given(tmp_path: Path) -> None:
    files = {"a.txt": "one\n\ntwö\r\n".encode(), "b.txt.gz": gzip.compress(b"three"), "other.md": b"no"}
    catalog = opened(tmp_path / "d", files, format="text")
    assert rows(catalog) == [b"one", b"", "twö".encode(), b"three"]
    assert opened(tmp_path / "e", {"a.txt": b"one\ntwo\n"}).samples == 1


def test_each_file_of_text_is_a_document_where_that_format_is_given(tmp_path: Path) -> None:
    files = {
        "a.txt": "one\n\ntwö\n".encode(),
        "b.txt.zst": zstandard.compress(b"three"),
        "c.txt": b"",
        "d.md": b"no",
    }
    files["e.txt.gz"] = gzip.compress("\ufeffé".encode())
    catalog = opened(tmp_path / "d", files, format="documents")
    assert rows(catalog) == ["one\n\ntwö\n".encode(), b"three", "é".encode()]
    assert catalog.key(1) == "b.txt.zst:0"


# ---- malformed rows


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        (
            "a.jsonl",
            b'{"a": 1}\n{"a": \n{"a": 3}\n',
            "a.jsonl line 2: is no JSON: Expecting value at character 7",
        ),
        ("a.jsonl", b'{"a": 1}\n\xff\n{"a": 3}\n', "a.jsonl line 2: is no JSON: 'utf-8' codec can't decode"),
        (
            "a.jsonl",
            b'{"a": 1}\n' + b"[" * 99999 + b'\n{"a": 3}',
            "line 2: is no JSON: it is nested too deeply",
        ),
        ("a.csv", b"a,b\n1,2\n3\n4,5\n", "a.csv line 3: has 1 cells, its header 2"),
        ("a.csv", b'a,b\n1,2\n"x"y,3\n4,5\n', "a.csv line 3: is no CSV: ',' expected after '\"'"),
        ("a.csv", b"a,b\n1,2\n\xff,3\n4,5\n", "a.csv line 3: is no UTF-8 text"),
    ],
)
def test_a_malformed_row_is_a_sample_with_a_note(tmp_path: Path, name: str, body: bytes, says: str) -> None:
    catalog = opened(tmp_path / "d", {name: body})
    assert catalog.samples == 3
    (note,) = catalog.notes
    assert note.startswith("1 of 3 rows do not parse, the first is ")
    assert says in note


BAD: dict[str, tuple[dict[str, bytes], type[CacheError], str]] = {
    "a list": ({"a.jsonl": b'[\n{"a": 1},\n'}, CorruptData, "none of its 2 lines is jsonl"),
    "a list in one line": ({"a.jsonl": b'[{"a": 1}, {"a": 2}]\n'}, InvalidInput, "is one JSON list: write each item on"),
    "an open quote": ({"a.csv": b'a,b\n1,2\n3,"4\n5,6\n'}, CorruptData, "line 3: a quote is opened and never closed"),
    "two columns": ({"a.csv": b"a,a\n1,2\n"}, InvalidInput, "two columns called 'a'"),
    "latin header": ({"a.csv": b"\xff,a\n1,2\n"}, CorruptData, "no UTF-8 text: save it as UTF-8"),
    "utf-16": ({"a.csv": "a,b\n1,2\n".encode("utf-16")}, InvalidInput, "UTF-16: save it as UTF-8"),
    "gzip": ({"a.jsonl": gzip.compress(b"{}\n")}, InvalidInput, "a.jsonl is gzip, not rows of text"),
    "parquet": ({"a.jsonl": b"PAR1" + bytes(600)}, InvalidInput, "a.jsonl is Parquet, not rows of text"),
    "binary": ({"a.csv": bytes(600)}, InvalidInput, "a.csv is binary, not rows of text"),
    "empty": ({"a.jsonl": b"", "b.jsonl": b"\n"}, NotFound, "holds no rows: its jsonl files are empty"),
    "a header alone": ({"a.csv": b"a,b\n"}, NotFound, "holds no rows: its csv files are empty"),
    "truncated": ({"a.jsonl.gz": gzip.compress(b"{}\n" * 99)[:-9]}, CorruptData, "a.jsonl.gz is truncated: its gzip"),
    "not gzip": ({"a.jsonl.gz": b"{}\n"}, CorruptData, "a.jsonl.gz is not valid gzip"),
    "not zstd": ({"a.csv.zst": b"a\n1\n"}, CorruptData, "a.csv.zst is not valid zstd"),
    "xz": ({"a.jsonl.xz": b"x"}, InvalidInput, "compressed as xz, which is not read: recompress it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    files, kind, says = BAD[case]
    with pytest.raises(kind) as caught:
        opened(tmp_path / "d", files)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "/d" in str(caught.value)


def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"a.jsonl.zst": zstandard.compress(b"[" * (256 << 20))})
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData, match=r"a\.jsonl\.zst: the line at byte 0 is longer than 64 MiB"):
            compiled(tmp_path / "d")
        assert tracemalloc.get_traced_memory()[1] < 180 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".zst"])
def test_an_object_that_decodes_to_too_much_is_refused(ending: str) -> None:
    body = COMPRESS[ending](b"{}\n" * 400_000)
    packed = ObjectBytes(inputs_of({f"a.jsonl{ending}": body}), most_bytes=1 << 20)
    with pytest.raises(InvalidInput, match=rf"a\.jsonl\{ending} decodes to more than.*split it into smaller"):
        list(packed.windows(0))


@pytest.mark.parametrize("format", ["jsonl", "csv", "text"])
def test_a_given_format_reads_what_its_names_choose(tmp_path: Path, format: str) -> None:
    write_files(tmp_path / "d", {"a.jsonl": b'{"a": 1}\n', "a.csv": b"a\n1\n", "a.txt": b"a\n"})
    catalog = compiled(tmp_path / "d", Options(format=format))
    assert (catalog.format, catalog.samples) == (format, 1)
