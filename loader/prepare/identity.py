"""The identity of a user's function: its qualified name, and a digest of its source and of the data that it refers to.

Functions of the user's own modules that it calls, and the methods of their classes, count with their source, so that an
edit of a helper is an edit of it. Installed libraries count by their versions, which are kept beside the digest and are not
part of it. Byte code counts where the source is not there, or was edited after the function was loaded.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import inspect
import linecache
import logging
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from cachesvc.core.errors import InvalidInput

_LIBRARIES = ("numpy", "torch", "PIL")
_INSTALLED = re.compile(rf"<frozen |{re.escape(sysconfig.get_path('stdlib'))}/|.*/(site|dist)-packages/")
"""Files of libraries: those of Python, and of packages in any environment, user site or folder of the system."""
_PLAIN = (
    *(bool, int, float, complex, str, bytes, bytearray, range, type(None), type(Ellipsis)),
    *(PurePath, np.dtype, torch.dtype, torch.device),
)
"""Types of values that their `repr` tells in full."""
_NAMED = (
    *(
        type,
        types.ModuleType,
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        np.ufunc,
        logging.Logger,
    ),
    *(types.WrapperDescriptorType, types.MemberDescriptorType, types.GetSetDescriptorType),
)
"""Types of values that count by their names."""
_TOO_DEEP = 50


def qualified_name(function: Callable[..., Any]) -> str:
    """Return `module.name` of a function, of what a partial calls, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return _name(function if hasattr(function, "__qualname__") else type(function))


def digest_of(function: Callable[..., Any], opaque: bool = False) -> str:
    """Return the digest of a function, 32 hex digits. `opaque`: data without a digest counts by its type alone.

    Raises InvalidInput for such data otherwise.
    """
    digest = hashlib.blake2b(digest_size=16)
    walk = _Walk(opaque)
    for part in walk.parts(function, 0):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def library_versions(function: Callable[..., Any]) -> Mapping[str, str]:
    """Return the versions of numpy, torch, Pillow and of the package that defines a function, where they are loaded."""
    own = qualified_name(function).partition(".")[0]
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in (*_LIBRARIES, own)}
    return {name: version for name, version in found.items() if isinstance(version, str)}


class _Walk:
    """Yields the parts of a function's identity. Each function counts once, also where functions call each other."""

    def __init__(self, opaque: bool, seen: set[int] | None = None) -> None:
        self._opaque = opaque
        self._seen = set[int]() if seen is None else seen

    def parts(self, value: Any, depth: int) -> Iterator[bytes]:
        if depth > _TOO_DEEP:
            raise InvalidInput("the data that prepare= refers to is nested too deeply; give prepare_name=")
        yield type(value).__qualname__.encode()
        if isinstance(value, Enum):
            yield from self.parts((type(value), value.name, value.value), depth + 1)
        elif isinstance(value, _PLAIN):
            yield repr(value).encode("utf-8", "surrogateescape")
        elif isinstance(value, (list, tuple)):
            for each in value:
                yield from self.parts(each, depth + 1)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(b"".join(self.parts(each, depth + 1)) for each in value)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                yield from self.parts(key, depth + 1)
                yield from self.parts(each, depth + 1)
        elif isinstance(value, functools.partial):
            yield from self.parts((value.func, value.args, value.keywords), depth + 1)
        elif isinstance(value, types.MethodType):
            yield from self.parts((value.__func__, value.__self__), depth + 1)
        elif isinstance(value, slice):
            yield from self.parts((value.start, value.stop, value.step), depth + 1)
        elif isinstance(value, re.Pattern):
            yield from self.parts((value.pattern, value.flags), depth + 1)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value, depth)
        elif isinstance(value, _NAMED):
            yield _name(value).encode()
            if isinstance(value, type):
                yield from self._members(value, depth)
        else:
            yield from self._object(value, depth)

    def _function(self, function: types.FunctionType, depth: int) -> Iterator[bytes]:
        yield _name(function).encode()
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        code = function.__code__
        if _INSTALLED.match(code.co_filename):
            innermost = inspect.unwrap(function)
            if not _INSTALLED.match(_file_of(innermost)):  # a library's decorator of a user's function
                yield from self.parts(function.__wrapped__, depth + 1)  # type: ignore[attr-defined]
                yield from _Walk(True, self._seen).parts(_closure(function), depth + 1)
            return
        source = _source(code)
        yield (source or "").encode("utf-8", "surrogateescape")
        if source is None or function.__name__ == "<lambda>":  # several may stand in one line
            yield from self._code(code, depth)
        yield from self.parts((function.__defaults__, function.__kwdefaults__), depth + 1)
        yield from self.parts(_closure(function), depth + 1)
        names = _names(code)
        for name in sorted(names.intersection(function.__globals__)):
            yield name.encode()
            yield from self._global(function.__globals__[name], names, depth)
        for module in _imported(function):
            yield from self._global(module, names, depth)

    def _global(self, value: Any, names: set[str], depth: int) -> Iterator[bytes]:
        """Yield a global that code refers to. Of a module of the user's, the members that the code names count."""
        if not isinstance(value, types.ModuleType) or _is_installed(value) or depth > _TOO_DEEP:
            yield from self.parts(value, depth + 1)
            return
        for name in sorted(names):
            if hasattr(value, name) and getattr(value, name) is not value:
                yield from self._global(getattr(value, name), names - {name}, depth + 1)

    def _code(self, code: types.CodeType, depth: int) -> Iterator[bytes]:
        yield code.co_code + getattr(code, "co_exceptiontable", b"")
        yield repr((code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount)).encode()
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant, depth + 1)
            else:
                yield from self.parts(constant, depth + 1)

    def _members(self, value: type, depth: int) -> Iterator[bytes]:
        """Yield the members of a class, and of those that it is derived from, unless a library defines them. Data without a
        digest counts by its type."""
        if id(value) in self._seen or _is_installed(value):
            return
        self._seen.add(id(value))
        yield from self.parts(value.__bases__, depth + 1)
        for name, member in sorted(vars(value).items()):
            functions = _functions_of(member)
            if functions or not name.startswith("__"):
                yield name.encode()
                generated = functions and _file_of(functions[0]) == "<string>"  # by `dataclass`, say
                walk = self if functions and not generated else _Walk(True, self._seen)
                yield from walk.parts(functions or member, depth + 1)

    def _object(self, value: Any, depth: int) -> Iterator[bytes]:
        """Yield an array's or a tensor's bytes, or the class and the attributes of an object that has no others."""
        if isinstance(value, torch.Tensor):
            with suppress(TypeError, RuntimeError):  # such as sparse ones, which have no digest
                value = (value.float() if value.dtype is torch.bfloat16 else value).detach().cpu().numpy()
        own = callable(value) or not _is_installed(type(value))
        if isinstance(value, (np.ndarray, np.generic)) and not np.asarray(value).dtype.hasobject:
            array = np.ascontiguousarray(value)
            yield f"{array.dtype.str}{array.shape}".encode()
            yield array.tobytes()
        elif own and hasattr(value, "__dict__") and id(value) not in self._seen:
            self._seen.add(id(value))
            yield from self.parts((type(value), vars(value)), depth + 1)
        elif id(value) not in self._seen and not self._opaque:
            raise InvalidInput(
                f"prepare= refers to a {type(value).__module__}.{type(value).__qualname__}, which has no digest: pass plain"
                " data, or give prepare_name=, and another name whenever its results change"
            )


def _name(value: Any) -> str:
    """Return `module.name` of a function, class or module. A script has the name under which others import it."""
    module = str(getattr(value, "__module__", None) or "")
    if module == "__main__":
        main = sys.modules[module]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file or module).stem
    return f"{module}.{getattr(value, '__qualname__', None) or getattr(value, '__name__', '')}"


def _functions_of(member: Any) -> tuple[Any, ...]:
    """Return the functions and classes that a member of a class is made of; () for data."""
    if isinstance(member, (types.FunctionType, type)):
        return (member,)
    if isinstance(member, (staticmethod, classmethod)):
        return (member.__func__,)
    if isinstance(member, functools.cached_property):
        return (member.func,)
    return (member.fget, member.fset) if isinstance(member, property) else ()


def _file_of(function: Any) -> str:
    return str(getattr(getattr(function, "__code__", None), "co_filename", ""))


def _closure(function: types.FunctionType) -> list[Any]:
    return [_content(cell) for cell in function.__closure__ or ()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: types.CodeType) -> set[str]:
    """Return the global names and attributes that code and the functions inside it refer to."""
    return {name for each in _nested(code) for name in each.co_names}


def _imported(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """Yield the modules of the user's that a function imports when it runs."""
    for code in _nested(function.__code__):
        steps = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
        for level, names, step in zip(steps, steps[1:], steps[2:]):
            if step.opname == "IMPORT_NAME" and (level.argval or _is_of_user(step.argval)):
                with suppress(Exception):  # the function may never come to it
                    yield __import__(
                        step.argval, function.__globals__, None, names.argval or (), level.argval
                    )


def _is_of_user(module: str) -> bool:
    """Tell whether a module can be imported, and no library defines it."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # of `__main__`
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations
    return any(not _INSTALLED.match(str(place)) for place in places or ())


def _nested(code: types.CodeType) -> list[types.CodeType]:
    """Return code and that of the functions inside it."""
    found = [code]
    for each in found:
        found += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]
    return found


def _source(code: types.CodeType) -> str | None:
    """Return the text that code was compiled from; None where there is none, or the file was edited since."""
    linecache.checkcache(code.co_filename)
    try:
        text = inspect.getsource(code)
        found = code in _codes("".join(linecache.getlines(code.co_filename)), code.co_filename)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return textwrap.dedent(text) if found else None


@functools.lru_cache(8)
def _codes(text: str, file: str) -> frozenset[types.CodeType]:
    """Compile a module, and return the code of all functions in it."""
    return frozenset(_nested(compile(text, file, "exec", dont_inherit=True)))


def _is_installed(value: Any) -> bool:
    """Tell whether a library or the interpreter defines a value: its version stands for its source."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    module = sys.modules.get(str(name))
    if module is None or module.__name__ == "__main__":
        return False
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return path is None or _INSTALLED.match(path) is not None
