"""Tensors over host memory that a device may read, made through DLPack.

torch's other ways in (`__cuda_array_interface__`) ask the driver about the first address, which may lie in an extent
that is not registered.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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
    """DLManagedTensor of dlpack.h. A null deleter means that nothing is to be freed."""

    _fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class HostRows:
    """Rows at multiples of a stride in host memory, as a tensor of a device. No access is made before an index."""

    def __init__(
        self, address: int, rows: int, stride_bytes: int, row_bytes: int, unit: int, device: torch.device
    ) -> None:
        """`unit`: bytes of an element (1, 2, 4 or 8); divides the address, the stride and the row."""
        self._shape = (ctypes.c_int64 * 2)(rows, row_bytes // unit)
        self._strides = (ctypes.c_int64 * 2)(stride_bytes // unit, 1)
        kind, code = (_CUDA if device.type == "cuda" else _CPU), (_UINT if unit == 1 else _INT)
        number = device.index if device.index is not None else 0
        self._managed = _ManagedTensor(
            _Tensor(address, kind, number, 2, code, 8 * unit, 1, self._shape, self._strides, 0), None, None
        )
        self.tensor: torch.Tensor = torch.from_dlpack(_capsule(self._managed))
        """[rows, row_bytes / unit], unsigned for bytes, else signed. This object must outlive it."""
        assert self.tensor.dtype is _DTYPES[unit], "DLPack and torch disagree on a type"


def _capsule(managed: _ManagedTensor) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(managed), b"dltensor", None)
