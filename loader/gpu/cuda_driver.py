"""The four calls of the CUDA driver that torch does not offer, by ctypes: `libcuda.so.1` is on every machine with a
driver, whatever CUDA version torch was built for."""

from __future__ import annotations

import ctypes
from functools import cache

from cachesvc.core.errors import CacheError

_READ_ONLY_HOST_REGISTER_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_...
_PORTABLE, _DEVICE_MAP, _READ_ONLY = 0x01, 0x02, 0x08  # CU_MEMHOSTREGISTER_...
_CAPTURE_MODE_RELAXED = 2


class DriverError(CacheError):
    """A call of the CUDA driver failed."""


@cache
def _driver() -> ctypes.CDLL:
    found = ctypes.CDLL("libcuda.so.1")
    found.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    found.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
    found.cuMemHostGetDevicePointer_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    return found


def _check(call: str, result: int) -> None:
    if result:
        raise DriverError(f"{call} of the CUDA driver failed with error {result}")


def registers_read_only(device: int) -> bool:
    """Return whether a device can read host memory that this process may only read."""
    found = ctypes.c_int()
    _check(
        "cuDeviceGetAttribute",
        _driver().cuDeviceGetAttribute(ctypes.byref(found), _READ_ONLY_HOST_REGISTER_SUPPORTED, device),
    )
    return bool(found.value)


def register_host(address: int, size_bytes: int) -> None:
    """Pin mapped, read-only memory, and let every device read it at its own address. 64 MiB take about 3 ms.

    Raises DriverError, also on a machine where devices would read it at another address.
    """
    driver, seen = _driver(), ctypes.c_void_p()
    _check(
        "cuMemHostRegister",
        driver.cuMemHostRegister_v2(address, size_bytes, _PORTABLE | _DEVICE_MAP | _READ_ONLY),
    )
    _check("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer_v2(ctypes.byref(seen), address, 0))
    if seen.value != address:
        unregister_host(address)
        raise DriverError("this machine's devices read host memory at other addresses than the processor")


def unregister_host(address: int) -> None:
    """Undo `register_host`; no kernel reads the memory any more. Raises DriverError."""
    _check("cuMemHostUnregister", _driver().cuMemHostUnregister(address))


def leave_captures_alone() -> None:
    """Let this thread allocate and wait while another thread captures a CUDA graph. By default that ends the capture
    with an error. Raises DriverError."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _check(
        "cuThreadExchangeStreamCaptureMode",
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)),
    )
