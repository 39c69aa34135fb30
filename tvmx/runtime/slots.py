"""The inputs of a program: each array is checked, and copied only when the kernels could not read it where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmx.errors import InputError
from tvmx.runtime.arena import ALIGNMENT, aligned_array
from tvmx.runtime.dtypes import numpy_dtype
from tvmx.runtime.manifest import Check, TensorInfo

Array = np.ndarray[Any, Any]

# Copying this little is cheaper than asking numpy where the data lie.
_ALWAYS_COPY_BYTES = 8192


class InputSlot:
    """One input: what is expected, and the array bound to it with the address that kernels get."""

    def __init__(self, info: TensorInfo, checks: tuple[Check, ...]) -> None:
        self.info = info
        self.dtype = numpy_dtype(info.dtype)
        self.checks = checks
        static = all(isinstance(d, int) for d in info.shape)
        self.shape: tuple[int, ...] | None = tuple(d for d in info.shape if isinstance(d, int)) if static else None
        self.array: Array | None = None
        self.address = 0
        self._own: Array | None = None
        self._own_address = 0

    def bind(self, value: Any, copy: bool) -> None:
        """Take `value`; with `copy`, later changes to it are not seen. Raises InputError."""
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.dtype != self.dtype or (
            array.shape != self.shape if self.shape is not None else array.ndim != len(self.info.shape)
        ):
            raise InputError(self._mismatch(array))
        if self.checks:
            self._check_range(array)
        if not copy and array.nbytes > _ALWAYS_COPY_BYTES and array.flags.c_contiguous:
            address = array.ctypes.data
            if address % ALIGNMENT == 0:
                self.array, self.address = array, address
                return
        own = self._own
        if own is None or own.shape != array.shape:
            own = self._own = aligned_array(array.shape, self.dtype)
            self._own_address = own.ctypes.data
        np.copyto(own, array)
        self.array, self.address = own, self._own_address

    def _mismatch(self, array: Array) -> str:
        want = f"{self.info.dtype}{_shape_text(self.info.shape)}"
        got = f"{array.dtype}{_shape_text(array.shape)}"
        what = "dtype" if array.dtype != self.dtype else "shape"
        fix = f"; convert it with array.astype({self.dtype.name!r})" if what == "dtype" else ""
        return f"input {self.info.name!r}: expected {want}, got {got} (wrong {what}){fix}"

    def _check_range(self, array: Array) -> None:
        if not array.size:
            return
        low, high = int(array.min()), int(array.max())
        for check in self.checks:
            if low < check.low or high > check.high:
                bad = low if low < check.low else high
                raise InputError(
                    f"input {self.info.name!r} holds {bad}, but node {check.node!r} uses it as an index and takes "
                    f"[{check.low}, {check.high}]"
                )


def check_names(inputs: Mapping[str, Any], slots: Mapping[str, object]) -> None:
    """Raise InputError unless the names are exactly those of the model."""
    missing = [n for n in slots if n not in inputs]
    unknown = [n for n in inputs if n not in slots]
    if missing or unknown:
        parts = [f"missing {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"unknown {', '.join(map(repr, unknown))}"] if unknown else []
        raise InputError(f"inputs {' and '.join(parts)}; the model takes {', '.join(map(repr, slots)) or 'none'}")


def _shape_text(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
