"""The identity of a function: what changes it, and what does not."""

from __future__ import annotations

import functools
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
    exec(compile(text, str(path), "exec"), vars(module))
    import linecache

    linecache.checkcache(str(path))
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
