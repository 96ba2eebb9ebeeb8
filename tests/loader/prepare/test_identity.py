"""The identity of a function: what changes it, and what does not."""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.core.errors import InvalidInput
from loader.prepare.identity import digest_of, library_versions, qualified_name

SIDE = "SIDE = 4\n"
HELPER = "def cut(sample):\n    return sample[:SIDE]\n"
FUNCTION = "def prepare(sample, factor=2):\n    return cut(sample) * factor\n"


def function_of(folder: Path, text: str, name: str = "of_a_user") -> Any:
    """Import a module with this text and return its `prepare`."""
    path = folder / f"{name}.py"
    path.write_text(text)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    import linecache

    linecache.clearcache()  # a second edit within a tick of the clock
    return module.prepare


@pytest.mark.parametrize(
    "edited",
    [
        SIDE + HELPER + FUNCTION.replace("* factor", "+ factor"),
        SIDE + HELPER + FUNCTION.replace("factor=2", "factor=3"),
        SIDE + HELPER.replace("[:SIDE]", "[SIDE:]") + FUNCTION,
        SIDE.replace("4", "5") + HELPER + FUNCTION,
    ],
    ids=["itself", "a default", "a helper", "a global"],
)
def test_an_edit_of_the_function_or_of_what_it_uses_is_another_digest(tmp_path: Path, edited: str) -> None:
    before = digest_of(function_of(tmp_path, SIDE + HELPER + FUNCTION))
    assert digest_of(function_of(tmp_path, SIDE + HELPER + FUNCTION)) == before
    assert digest_of(function_of(tmp_path, edited)) != before


DECORATED = """
import functools
def decorated(function):
    @functools.wraps(function)
    def called(sample):
        return function(sample) * 1
    return called
@decorated
def prepare(sample):
    return sample
"""
OF_LIBRARY = """
import torch
SIZE = 1
@torch.no_grad()
def cut(sample):
    return sample[:SIZE]
def prepare(sample):
    return cut(sample)
"""
OF_CLASSES = """
SIZE = 1
class Base:
    def cut(self, sample):
        return sample[:SIZE]
class Resize(Base):
    def __call__(self, sample):
        return self.cut(sample)
prepare = Resize()
"""
STATIC = """
class Sizes:
    size = 1
    @staticmethod
    def cut(sample):
        return sample[:Sizes.size]
def prepare(sample):
    return Sizes.cut(sample)
"""
CONFIGURED = """
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
class Side(Enum):
    LEFT = 1
@dataclass
class Config:
    sizes: list[int] = field(default_factory=lambda: [4])
    side: Side = Side.LEFT
    place: Path = Path("/data")
config = Config()
def prepare(sample):
    return sample, config.sizes, config.side, config.place
"""


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        (DECORATED, "* 1", "* 2"),
        (DECORATED, "return sample\n", "return -sample\n"),
        (OF_LIBRARY, "SIZE = 1", "SIZE = 2"),
        (OF_CLASSES, "SIZE = 1", "SIZE = 2"),
        (OF_CLASSES, "[:SIZE]", "[SIZE:]"),
        (STATIC, "size = 1", "size = 2"),
        (STATIC, "[:Sizes", "[-Sizes"),
        (CONFIGURED, "[4]", "[5]"),
        (CONFIGURED, "LEFT = 1", "LEFT = 2"),
        (CONFIGURED, "/data", "/other"),
    ],
)
def test_what_decorators_classes_and_settings_say_counts(
    tmp_path: Path, text: str, before: str, after: str
) -> None:
    digest = digest_of(function_of(tmp_path, text))
    assert digest_of(function_of(tmp_path, text)) == digest
    assert text.replace(before, after) != text
    assert digest_of(function_of(tmp_path, text.replace(before, after))) != digest


@pytest.mark.parametrize(
    "by",
    [
        "from a_helper import cut\n    return cut(sample)",
        "import a_helper\n    return a_helper.cut(sample)",
        "import a_package.a_helper\n    return a_package.a_helper.cut(sample)",
    ],
)
def test_a_module_that_is_imported_in_the_function_counts(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_package").mkdir()
    digests = []
    for size in (4, 5):
        for path in (tmp_path, tmp_path / "a_package"):
            (path / "a_helper.py").write_text(f"SIDE = {size}\n{HELPER}")
        digests.append(digest_of(function_of(tmp_path, f"def prepare(sample):\n    {by}\n")))
        for name in ("a_helper", "a_package", "a_package.a_helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        shutil.rmtree(tmp_path / "a_package" / "__pycache__", ignore_errors=True)
    assert digests[0] != digests[1]


def test_an_edit_after_the_function_was_loaded_is_not_taken_for_it(tmp_path: Path) -> None:
    text = SIDE + HELPER + FUNCTION
    loaded = function_of(tmp_path, text)
    before = digest_of(loaded)
    edited = digest_of(function_of(tmp_path, text.replace("* factor", "+ factor")))
    assert digest_of(loaded) not in (before, edited), "its file says something else by now"


def test_functions_without_a_file_differ_by_their_constants() -> None:
    found = []
    for factor in (2, 3, 2):
        names: dict[str, Any] = {"__name__": __name__}
        exec(f"def prepare(sample):\n    return sample * {factor}", names)
        found.append(digest_of(names["prepare"]))
    assert found[0] == found[2] != found[1]


def test_a_script_has_the_identity_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = function_of(tmp_path, SIDE + HELPER + FUNCTION)
    as_module = qualified_name(function), digest_of(function)
    script = types.ModuleType("__main__")
    script.__file__ = str(tmp_path / "of_a_user.py")
    monkeypatch.setitem(sys.modules, "__main__", script)
    text = (tmp_path / "of_a_user.py").read_text()
    exec(compile(text, script.__file__, "exec", dont_inherit=True), vars(script))
    assert (qualified_name(script.prepare), digest_of(script.prepare)) == as_module


def test_an_edit_of_something_else_in_its_module_changes_nothing(tmp_path: Path) -> None:
    text = SIDE + HELPER + FUNCTION
    before = digest_of(function_of(tmp_path, text))
    assert digest_of(function_of(tmp_path, text + "\ndef other():\n    return 1\n")) == before


def scaled(by: object) -> Any:
    return lambda sample: sample * by


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2, 3),
        (1, 1.0),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"a": 2}),
        (np.arange(3), np.arange(4)),
        (np.zeros(2, np.int32), np.zeros(2, np.float32)),
        (torch.zeros(2), torch.ones(2)),
    ],
)
def test_plain_data_that_it_closes_over_counts(one: object, other: object) -> None:
    assert digest_of(scaled(one)) != digest_of(scaled(other))
    assert digest_of(scaled(one)) == digest_of(scaled(one))


def test_lambdas_of_one_line_differ() -> None:
    first, second = (lambda sample: sample + 1), (lambda sample: sample + 2)
    assert digest_of(first) != digest_of(second)


class Scale:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, sample: Any) -> Any:
        return sample * self.by

    def apply(self, sample: Any) -> Any:
        return sample * self.by


def test_partials_objects_and_methods_count_with_their_data() -> None:
    digests = [
        digest_of(each)
        for by in (1, 2)
        for each in (
            Scale(by),
            Scale(by).apply,
            functools.partial(np.multiply, by),
            functools.partial(Scale(by)),
        )
    ]
    assert len(set(digests)) == len(digests)
    assert digest_of(Scale(1)) == digests[0]


def test_functions_that_call_each_other_have_a_digest(tmp_path: Path) -> None:
    text = "def other(n):\n    return prepare(n)\ndef prepare(n):\n    return other(n)\n"
    assert digest_of(function_of(tmp_path, text))


def test_data_without_a_digest_is_refused_and_counts_by_its_type_under_a_name() -> None:
    with open("/dev/null") as file:
        with pytest.raises(InvalidInput, match="prepare_name="):
            digest_of(scaled(file))
        assert digest_of(scaled(file), opaque=True) != digest_of(scaled(object()), opaque=True)


def test_names_and_versions() -> None:
    assert qualified_name(functools.partial(scaled, 1)) == f"{__name__}.scaled"
    assert qualified_name(Scale(1)) == f"{__name__}.Scale"
    assert library_versions(np.flip)["numpy"] == np.__version__
