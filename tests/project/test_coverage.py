"""The report on coverage."""

from __future__ import annotations

from tests.project.coverage import LEAST, report


def module(run: int, missing: int) -> dict[str, list[int]]:
    return {"executed_lines": [*range(run)], "missing_lines": [*range(missing)]}


def test_the_total_comes_first_and_then_the_modules_with_the_least() -> None:
    files = {f"m{run:02}.py": module(run, 20 - run) for run in range(20)} | {"empty.py": module(0, 0)}
    total, *least = report(files)
    assert total.startswith("pure tests run 47.5% of 400 lines")
    assert [line.split()[-1] for line in least] == [f"m{run:02}.py" for run in range(1, LEAST + 1)]
    assert least[2].split()[0] == "15%"


def test_no_lines_are_no_error() -> None:
    assert len([*report({})]) == 1
