"""Tensors over host memory that a device may read, made through DLPack.

torch's other ways in (`__cuda_array_interface__`) ask the driver about the first address, which may lie in an extent
that is not registered.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_CPU, _CUDA = 1, 2  # DLDeviceType
_INT, _UINT = 0, 1  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, with the arrays that it points to."""

    _fields_ = (
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 2),
        ("strides", ctypes.c_int64 * 2),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value


def host_rows(
    address: int, rows: int, stride_bytes: int, row_bytes: int, unit: int, device: torch.device
) -> torch.Tensor:
    """Return rows at multiples of a stride in host memory as a tensor of a device, [rows, row_bytes / unit], without
    an access to the memory.

    `unit`: bytes of an element (1, 2, 4 or 8), unsigned for bytes, else signed; divides address, stride and row.
    """
    # torch calls the deleter with the structure when the tensor dies, after Python may have freed what it owns.
    place = _libc.malloc(ctypes.sizeof(_ManagedTensor))
    found = _ManagedTensor.from_address(place)
    found.shape[:], found.strides[:] = (rows, row_bytes // unit), (stride_bytes // unit, 1)
    found.manager_ctx, found.deleter = None, _FREE
    kind, code = (_CUDA if device.type == "cuda" else _CPU), (_UINT if unit == 1 else _INT)
    shape, strides = (
        ctypes.cast(each, ctypes.POINTER(ctypes.c_int64)) for each in (found.shape, found.strides)
    )
    found.tensor = _Tensor(address, kind, device.index or 0, 2, code, 8 * unit, 1, shape, strides, 0)
    tensor: torch.Tensor = torch.from_dlpack(_capsule(place))
    return tensor


def _capsule(managed: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(managed, b"dltensor", None)
