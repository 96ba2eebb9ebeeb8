"""The identity of a user's function: its qualified name, and a digest of its source and of the data that it refers to.

Functions of the user's own modules that it calls count with their source, so that an edit of a helper is an edit of it.
Installed libraries count by their versions, which are kept beside the digest and are not part of it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cachesvc.core.errors import InvalidInput

_LIBRARIES = ("numpy", "torch", "PIL")
_INSTALLED = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}/|.*/(site|dist)-packages/")
"""Files of libraries: those of Python, and of packages in any environment, user site or folder of the system."""
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TOO_DEEP = 50


def qualified_name(function: Callable[..., Any]) -> str:
    """Return `module.name` of a function, of what a partial calls, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


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

    def __init__(self, opaque: bool) -> None:
        self._opaque = opaque
        self._seen: set[int] = set()

    def parts(self, value: Any, depth: int) -> Iterator[bytes]:
        if depth > _TOO_DEEP:
            raise InvalidInput("the data that prepare= refers to is nested too deeply; give prepare_name=")
        yield type(value).__qualname__.encode()
        if isinstance(value, _NUMBERS):
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
        elif isinstance(value, types.FunctionType):
            yield from self._function(value, depth)
        elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, np.ufunc)):
            yield from self._named(value, depth)
        else:
            yield from self._object(value, depth)

    def _function(self, function: types.FunctionType, depth: int) -> Iterator[bytes]:
        yield f"{function.__module__}.{function.__qualname__}".encode()
        if id(function) in self._seen or _is_installed(function):
            return
        self._seen.add(id(function))
        yield _source(function).encode("utf-8", "surrogateescape")
        if function.__name__ == "<lambda>":  # several may stand in one line
            yield from self._code(function.__code__, depth)
        yield from self.parts((function.__defaults__, function.__kwdefaults__), depth + 1)
        for cell in function.__closure__ or ():
            yield from self.parts(_content(cell), depth + 1)
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                yield name.encode()
                yield from self._global(function.__globals__[name], function.__code__, depth)

    def _global(self, value: Any, code: types.CodeType, depth: int) -> Iterator[bytes]:
        """Yield a global that code refers to. Of a module of the user's, the members that the code names count."""
        if not isinstance(value, types.ModuleType) or _is_installed(value):
            yield from self.parts(value, depth + 1)
            return
        for name in sorted(_names(code)):
            if hasattr(value, name):
                yield from self.parts(getattr(value, name), depth + 1)

    def _code(self, code: types.CodeType, depth: int) -> Iterator[bytes]:
        yield code.co_code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant, depth + 1)
            else:
                yield from self.parts(constant, depth + 1)

    def _named(self, value: Any, depth: int) -> Iterator[bytes]:
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".encode()
        if isinstance(value, type) and id(value) not in self._seen and not _is_installed(value):
            self._seen.add(id(value))
            yield _source(value).encode("utf-8", "surrogateescape")

    def _object(self, value: Any, depth: int) -> Iterator[bytes]:
        """Yield an array's or a tensor's bytes, or the class and the attributes of an object that has no others."""
        if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor, without an import of torch
            value = value.detach().cpu().numpy()
        if isinstance(value, (np.ndarray, np.generic)) and not np.asarray(value).dtype.hasobject:
            array = np.ascontiguousarray(value)
            yield f"{array.dtype.str}{array.shape}".encode()
            yield array.tobytes()
        elif callable(value) and hasattr(value, "__dict__") and id(value) not in self._seen:
            self._seen.add(id(value))
            yield from self._named(type(value), depth)
            yield from self.parts(vars(value), depth + 1)
        elif id(value) not in self._seen and not self._opaque:
            raise InvalidInput(
                f"prepare= refers to a {type(value).__module__}.{type(value).__qualname__}, which has no digest: pass plain"
                " data, or give prepare_name=, and another name whenever its results change"
            )


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: types.CodeType) -> set[str]:
    """Return the global names and attributes that code and the functions inside it refer to."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _source(value: Any) -> str:
    """Return the source of a function or class; without a file, as at a prompt, its byte code stands for it."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        code = getattr(value, "__code__", None)
        return f"{code.co_code.hex()} {code.co_names}" if code is not None else repr(value)


def _is_installed(value: Any) -> bool:
    """Tell whether a library or the interpreter defines a value: its version stands for its source."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    module = sys.modules.get(str(name))
    if module is None or module.__name__ == "__main__":
        return False
    path = getattr(module, "__file__", None)
    return path is None or _INSTALLED.match(path) is not None
