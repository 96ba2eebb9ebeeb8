"""Selects samples by an expression such as `label == 'cat' and width >= 256`, evaluated over whole columns.

The expression is parsed as Python, and a fixed set of nodes is interpreted; nothing is executed. A sample that lacks a tag
fails every comparison with it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.catalog.labels.tags import NUMBER
from cachesvc.core.errors import InvalidInput
from cachesvc.core.safe_text import printable

Mask = npt.NDArray[np.bool_]
_MAX_TEXT = 65_536
_MAX_DEPTH = 100
_MAX_DIGITS = 308
_MAX_NUMBER = 10**_MAX_DIGITS
"""Limit of the numbers that are compared: float64 holds all below, if not exactly."""
_SHOWN = 20
"""Number of classes that an error names."""
_EXACT = 2**53
"""Largest magnitude up to which float64 holds every integer exactly."""
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MIRROR: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}
_METHODS = ("startswith", "endswith")


@dataclass(frozen=True, slots=True)
class NumberValues:
    """The values of a numeric tag; NaN where a sample has none."""

    values: npt.NDArray[np.float64]

    def present(self) -> Mask:
        """Return a mask of the samples that have the tag."""
        return ~np.isnan(self.values)

    def test(self, predicate: Callable[[Any], Any]) -> Mask:
        """Return where the predicate holds for the number as text; a whole number is spelled 15, not 15.0."""
        used, codes = np.unique(self.values, return_inverse=True)
        return TextValues(
            codes, [None if np.isnan(value) else _spelled(float(value)) for value in used]
        ).test(predicate)

    def compare(self, compare: Callable[[Any, Any], Any], constant: Any) -> Mask:
        """Return where `value <op> constant` holds; NaN always fails.

        A constant text that spells a number equals that number: the source may have held it as text.
        """
        if isinstance(constant, str) and compare in (operator.eq, operator.ne):
            constant = _number(constant, constant)
        if not isinstance(constant, (int, float)):
            return _unlike(compare, constant, self.present())
        if isinstance(constant, int) and abs(constant) > _EXACT:  # numpy would round it
            used, codes = np.unique(self.values, return_inverse=True)
            hits = np.asarray([compare(value, constant) for value in used.tolist()], np.bool_)
            return np.asarray(hits[codes] & self.present())
        return np.asarray(compare(self.values, constant) & self.present())


@dataclass(frozen=True, slots=True)
class TextValues:
    """Dictionary-encoded text: `codes` index `values`, -1 where a sample has none.

    With `codes_are_numbers` (classes) a number is compared with the code, and a text must be one of the values.
    """

    codes: npt.NDArray[Any]
    values: Sequence[str | None]
    codes_are_numbers: bool = False

    def present(self) -> Mask:
        """Return a mask of the samples that have the tag."""
        return np.asarray(self.codes >= 0)

    def test(self, predicate: Callable[[Any], Any]) -> Mask:
        """Return where the predicate holds; it is called once per distinct value."""
        hits = [value is not None and bool(predicate(value)) for value in self.values]
        return np.asarray(np.asarray([*hits, False], np.bool_)[self.codes])

    def compare(self, compare: Callable[[Any, Any], Any], constant: Any) -> Mask:
        """Return where `value <op> constant` holds."""
        if isinstance(constant, str):
            if (
                self.codes_are_numbers
                and compare in (operator.eq, operator.ne)
                and constant not in self.values
            ):
                raise InvalidInput(f"no class {constant!r}; there are: {_some(self.values)}")
            return self.test(lambda value: compare(value, constant))
        if not self.codes_are_numbers and compare in (operator.eq, operator.ne):
            # A column of numbers is text where float64 does not hold one exactly, or where texts are among them.
            written = str(constant)
            return self.test(
                lambda value: compare(True, value == written or _number(value, None) == constant)
            )
        if not self.codes_are_numbers:
            return self._ordered(compare, constant)
        for code, value in enumerate(self.values):
            if value is not None and _number(value, code) != code:  # the number may be its index or its name
                raise InvalidInput(
                    f"the class of index {code} is called {value!r}, so a number may mean either:"
                    f" compare with the name, as in label == {value!r}"
                )
        return np.asarray(compare(self.codes, constant) & self.present())

    def _ordered(self, compare: Callable[[Any, Any], Any], constant: Any) -> Mask:
        """Return where `value <op> constant` holds for a number. Raises InvalidInput if a value spells no number."""
        hits = []
        for value in self.values:
            number = None if value is None else _number(value, value)
            if isinstance(number, str):
                raise InvalidInput(
                    f"{constant!r} cannot be ordered against {printable(number[:_SHOWN])!r}, a value of this tag: one is a "
                    "number, the other text"
                )
            hits.append(number is not None and bool(compare(number, constant)))
        return np.asarray(np.asarray([*hits, False], np.bool_)[self.codes])


Column = NumberValues | TextValues


def _some(values: Sequence[str | None]) -> str:
    more = f", and {len(values) - _SHOWN:,} more" if len(values) > _SHOWN else ""
    return ", ".join(printable(str(value)) for value in values[:_SHOWN]) + more


def _spelled(value: float) -> str:
    return str(int(value) if value.is_integer() and abs(value) <= _EXACT else value)


def _number(text: str, other: Any) -> Any:
    """Return the number that a text spells, else `other`."""
    if len(text) > _MAX_DIGITS or not NUMBER.fullmatch(text):
        return other
    number = int(text) if text.lstrip("-").isdigit() else float(text)
    return number if abs(number) < _MAX_NUMBER else other


def _unlike(compare: Callable[[Any, Any], Any], constant: Any, present: Mask) -> Mask:
    """Compare a number with a text: they are never equal, and have no order."""
    if compare is operator.eq:
        return np.zeros_like(present)
    if compare is operator.ne:
        return present
    raise InvalidInput(f"{constant!r} cannot be ordered against this tag: one is a number, the other text")


def select(expression: str, samples: int, column: Callable[[str], Column], names: Sequence[str]) -> Mask:
    """Return where an expression holds, bool[samples]. Raises InvalidInput naming the bad part."""
    if len(expression) > _MAX_TEXT:
        raise InvalidInput(f"a search of {len(expression)} characters; the limit is {_MAX_TEXT}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise InvalidInput(
            f"cannot read the search {expression[:200]!r}: {reason}; write it like label == 'cat' and key != 'x'"
        ) from error
    try:
        return _Search(samples, column, names, {}).mask(tree.body, 0)
    except RecursionError:  # Python parses deeper nesting than this module interprets
        raise InvalidInput("the search is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _Search:
    samples: int
    column: Callable[[str], Column]
    names: Sequence[str]
    loaded: dict[str, Column]

    def mask(self, node: ast.expr, depth: int) -> Mask:
        if depth > _MAX_DEPTH:
            raise InvalidInput(f"the search is nested deeper than {_MAX_DEPTH}")
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            # One after another: all masks of a long search at once may exceed memory.
            return reduce(join, (self.mask(value, depth + 1) for value in node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.mask(node.operand, depth + 1)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            return reduce(np.logical_and, (self._compare(*part) for part in zip(sides, node.ops, sides[1:])))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return np.full(self.samples, node.value)
        raise self._refusal(node)

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Mask:
        if isinstance(op, (ast.In, ast.NotIn)):
            return self._membership(left, isinstance(op, ast.NotIn), right)
        if isinstance(left, ast.Name) and type(op) in _COMPARE:
            return self._named(left).compare(_COMPARE[type(op)], self._constant(right))
        if isinstance(right, ast.Name) and type(op) in _COMPARE:
            return self._compare(right, _MIRROR.get(type(op), type(op))(), left)
        raise self._refusal(left)

    def _membership(self, left: ast.expr, inverted: bool, right: ast.expr) -> Mask:
        if isinstance(left, ast.Name) and isinstance(right, (ast.List, ast.Tuple, ast.Set)):
            column = self._named(left)
            selected = np.zeros(self.samples, np.bool_)
            for item in right.elts:
                selected |= column.compare(operator.eq, self._constant(item))
            return column.present() & ~selected if inverted else selected
        if isinstance(right, ast.Name) and isinstance(self._constant(left), str):
            part = self._constant(left)
            return self._named(right).test(lambda value: (part in str(value)) != inverted)
        raise self._refusal(right)

    def _call(self, node: ast.Call) -> Mask:
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr not in _METHODS or len(node.args) != 1:
            raise self._refusal(node)
        part = self._constant(node.args[0])
        if node.keywords or not isinstance(method.value, ast.Name) or not isinstance(part, str):
            raise self._refusal(node)
        name = method.attr
        test = str.startswith if name == "startswith" else str.endswith
        return self._named(method.value).test(lambda value: test(str(value), part))

    def _named(self, node: ast.Name) -> Column:
        if node.id not in self.names:
            raise InvalidInput(f"no name {node.id!r} to search by; there are: {', '.join(self.names)}")
        if node.id not in self.loaded:
            self.loaded[node.id] = self.column(node.id)
        return self.loaded[node.id]

    def _constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            if isinstance(value, (int, float)):
                return -value
        elif isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, str) or (isinstance(value, (int, float)) and abs(value) < _MAX_NUMBER):
                return value
        raise self._refusal(node)

    def _refusal(self, node: ast.expr) -> InvalidInput:
        try:
            refused = ast.unparse(node)[:100]
        except ValueError:  # Python refuses to print an integer of that many digits
            refused = "such a number"
        return InvalidInput(
            f"a search compares a name ({', '.join(self.names)}) with constants by == != < <= > >= in, "
            ".startswith() or .endswith(), joined by and, or, not; "
            f"it cannot hold {refused!r}"
        )
