"""DLPack by ctypes: take a tensor of another library where it lies, and hand one over."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmx.errors import InputError

if TYPE_CHECKING:
    from tvmx.runtime.device import DeviceArray

CPU, CUDA, PINNED, MANAGED = 1, 2, 3, 13  # DLDeviceType
_NAME, _USED = b"dltensor", b"used_dltensor"
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
_FLOAT8 = {  # codes of DLPack 1.1
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
}


class _Tensor(ctypes.Structure):
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


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_IsValid.restype = ctypes.c_int
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@dataclass(frozen=True)
class Borrowed:
    """A foreign tensor in device memory. `capsule` keeps it alive; the owner frees it when that goes."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    contiguous: bool
    device: int
    capsule: Any


def device_of(value: Any) -> tuple[int, int] | None:
    """(type, ordinal) of the device where a tensor lies; None for what does not speak DLPack."""
    ask = getattr(value, "__dlpack_device__", None)
    if ask is None:
        return None
    kind, ordinal = ask()
    return int(kind), int(ordinal)


def borrow(value: Any, stream: int) -> Borrowed:
    """A view of a device tensor, ready for use on `stream`. Raises InputError for a type that DLPack cannot name.

    The capsule stays a "dltensor", so that its own destructor gives the tensor back when it is dropped.
    """
    try:
        capsule = value.__dlpack__(stream=stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # a tensor that needs a gradient, say
        raise InputError(f"{type(value).__name__} does not hand its data over: {error}") from error
    if not _api.PyCapsule_IsValid(capsule, _NAME):
        raise InputError(f"{type(value).__name__}.__dlpack__ gave no unused DLPack tensor")
    managed = ctypes.cast(_api.PyCapsule_GetPointer(capsule, _NAME), ctypes.POINTER(_Managed)).contents
    t = managed.tensor
    shape = tuple(int(t.shape[i]) for i in range(t.ndim))
    strides = tuple(int(t.strides[i]) for i in range(t.ndim)) if t.strides else None
    return Borrowed(
        address=int(t.data or 0) + int(t.byte_offset),
        shape=shape,
        dtype=_dtype_name(int(t.code), int(t.bits), int(t.lanes)),
        contiguous=strides is None or _is_contiguous(shape, strides),
        device=int(t.device_id),
        capsule=capsule,
    )


def _dtype_name(code: int, bits: int, lanes: int) -> str:
    if lanes == 1 and code == _CODES["bool"]:
        return "bool"
    for name, value in _FLOAT8.items():
        if lanes == 1 and code == value:
            return name
    base = next((name for name, value in _CODES.items() if value == code), None)
    if base is None or lanes != 1:
        raise InputError(f"a DLPack tensor of type code {code}, {bits} bits, {lanes} lanes is no input of a model")
    return f"{base}{bits}"


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Export:
    """What an exported tensor needs until its taker is done with it."""

    def __init__(self, array: DeviceArray, ordinal: int) -> None:
        rank = len(array.shape)
        self.array = array
        self.shape = (ctypes.c_int64 * max(1, rank))(*array.shape)
        strides: list[int] = []
        count = 1
        for size in reversed(array.shape):
            strides.insert(0, count)
            count *= size
        self.strides = (ctypes.c_int64 * max(1, rank))(*strides)
        self.managed = _Managed()
        t = self.managed.tensor
        t.data, t.device_type, t.device_id, t.ndim = array.address, CUDA, ordinal, rank
        t.code, t.bits = _dtype_code(array.dtype_name)
        t.lanes, t.byte_offset = 1, 0
        t.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        t.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        self.managed.deleter = _release


_exports: dict[int, _Export] = {}  # by address of the managed tensor


def export(array: DeviceArray, ordinal: int) -> Any:
    """A DLPack capsule of a device array."""
    made = _Export(array, ordinal)
    address = ctypes.addressof(made.managed)
    _exports[address] = made
    return _api.PyCapsule_New(address, _NAME, ctypes.cast(_drop_capsule, ctypes.c_void_p))


def _dtype_code(name: str) -> tuple[int, int]:
    if name == "bool":
        return _CODES["bool"], 8
    if name in _FLOAT8:
        return _FLOAT8[name], 8
    base = name.rstrip("0123456789")
    return _CODES[base], int(name[len(base) :])


def _on_release(managed: Any) -> None:
    _exports.pop(ctypes.addressof(managed.contents), None)


def _on_drop(capsule: int) -> None:
    # The address of the capsule, which is being destroyed: it must not become a reference again.
    valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
    if valid(capsule, _NAME):
        pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
        _exports.pop(pointer(capsule, _NAME) or 0, None)


_release = _Deleter(_on_release)
_drop_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_on_drop)
