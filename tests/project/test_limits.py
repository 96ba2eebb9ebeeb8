"""docs/faults.md shows every retry and time limit of core/limits.py."""

from __future__ import annotations

import ast
from itertools import pairwise

from cachesvc.core import limits
from testbed import ROOT


def table() -> str:
    """Return the table that the page is to show: a row for each constant, in the module's order."""
    source = (ROOT / "cachesvc/core/limits.py").read_text()
    lines, body = source.splitlines(), ast.parse(source).body
    rows = ["| limit | | what is limited, and why |", "|---|---|---|"]
    for constant, text in pairwise(body):
        if not isinstance(constant, ast.Assign):
            continue
        heading = lines[constant.lineno - 3]
        if heading.startswith("# "):
            rows.append(f"| **{heading[2:]}** | | |")
        (name,) = (target.id for target in constant.targets if isinstance(target, ast.Name))
        value = getattr(limits, name)
        assert isinstance(text, ast.Expr), f"{name} has no docstring"
        says = " ".join(ast.literal_eval(text.value).split())
        rows.append(f"| `{name}` | {f'{value:g} s' if name.endswith('_S') else value} | {says.rstrip('.')} |")
    return "\n".join(rows) + "\n"


def test_the_page_of_faults_shows_all_limits() -> None:
    page = (ROOT / "docs/faults.md").read_text()
    assert table() in page, f"the table in docs/faults.md is to be:\n{table()}"
