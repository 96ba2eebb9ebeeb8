"""Calls of CUDA that torch does not make: registering host memory that this process may only read, and keeping out of
graph captures. Two go to the driver itself, `libcuda.so.1`, by ctypes: torch offers neither."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91  # CU_DEVICE_ATTRIBUTE_...
_READ_ONLY_HOST_REGISTER_SUPPORTED = 113
_PORTABLE, _MAPPED, _READ_ONLY = 0x01, 0x02, 0x08  # cudaHostRegister...
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaError(RuntimeError):
    """A call of CUDA failed."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(call: str, result: object) -> None:
    if number := int(getattr(result, "value", result)):  # type: ignore[call-overload]
        raise CudaError(f"{call} failed with error {number}")


def can_register(device: int) -> bool:
    """Return whether a device can read registered host memory, at the processor's address, that this process may only
    read. Raises CudaError."""
    return all(
        _attribute(each, device)
        for each in (_READ_ONLY_HOST_REGISTER_SUPPORTED, _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)
    )


def _attribute(number: int, device: int) -> int:
    found = ctypes.c_int()
    _check("cuDeviceGetAttribute", _driver().cuDeviceGetAttribute(ctypes.byref(found), number, device))
    return found.value


def register_host(address: int, size_bytes: int) -> None:
    """Pin mapped, read-only memory, and let every device read it. 64 MiB take about 3 ms. Raises CudaError."""
    flags = _PORTABLE | _MAPPED | _READ_ONLY
    _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, size_bytes, flags))


def unregister_host(address: int) -> None:
    """Undo `register_host`; no kernel reads the memory any more. Raises CudaError."""
    _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def leave_captures_alone() -> None:
    """Let this thread allocate and wait while another thread captures a CUDA graph. By default that ends the capture
    with an error. Raises CudaError."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _check(
        "cuThreadExchangeStreamCaptureMode",
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)),
    )
