"""Casts to and from the five 8-bit float types, exact for every value.

TVM's own conversions flush subnormals and know no FNUZ type, so the 256 values of a type are a table:
decoding is one look-up, encoding counts the midpoints between neighbours that lie below.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from tvm import te, tirx

from tvmx.frontend.node import Expr, Node, constant, dtype_of

FLOAT8 = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def values_of(dtype: str) -> np.ndarray:
    """float32 value of each of the 256 codes."""
    codes = np.arange(256, dtype=np.uint8)
    values: np.ndarray = codes.view(FLOAT8[dtype]).astype(np.float32)
    return values


def decode(node: Node, x: Expr, to: str) -> Expr:
    """float8 → a wider float."""
    table = constant(values_of(dtype_of(x)))

    def kernel(t: Any, values: Any) -> Any:
        return te.compute(
            t.shape,
            lambda *i: values(tirx.reinterpret("uint8", t(*i)).astype("int32")).astype(to),
            name="from_float8",
        )

    return node.te(kernel, x, table, name="from_float8")


def encode(node: Node, x: Expr, to: str, saturate: bool) -> Expr:
    """A wider float → float8, rounding half to even; what is too large saturates or becomes inf/NaN."""
    values = values_of(to)
    finite = values[:128][np.isfinite(values[:128])]  # codes 0..n-1 are the non-negative ones, sorted
    top = len(finite) - 1
    codes = np.arange(256, dtype=np.uint8)
    nan = int(codes[np.isnan(values)][0])
    infinite = codes[np.isposinf(values)]
    overflow = int(infinite[0]) if infinite.size else nan
    # The step beyond the largest value: where rounding would leave the range.
    last = finite[-1] + (finite[-1] - finite[-2]) / 2
    middles = np.append((finite[:-1] + finite[1:]) / 2, last).astype(np.float32)
    # Going up needs value > limit; a tie goes to the even code, so up from an odd one.
    odd = np.arange(len(middles)) % 2 == 1
    limits = np.where(odd, np.nextafter(middles, np.float32(0)), middles)
    limits = np.append(limits, np.full(128 - len(limits), np.inf)).astype(np.float32)
    fnuz = to.endswith("fnuz")

    def kernel(t: Any, table: Any) -> Any:
        k = te.reduce_axis((0, 128), "k")
        # The code is the number of limits below the value.
        found = te.compute(
            t.shape,
            lambda *i: te.sum((tirx.abs(t(*i).astype("float32")) > table(k)).astype("int32"), axis=k),
            name="code",
        )

        def at(*i: Any) -> Any:
            x32 = t(*i).astype("float32")
            code = found(*i)
            sign = tirx.Select(tirx.reinterpret("int32", x32) < 0, tirx.const(128, "int32"), tirx.const(0, "int32"))
            if fnuz:  # there is no negative zero: its code is NaN
                sign = tirx.Select(code == 0, tirx.const(0, "int32"), sign)
            if saturate:
                code = tirx.min(code, top) + sign
            else:
                beyond = tirx.const(overflow, "int32") + (sign if overflow != nan or not fnuz else 0)
                code = tirx.Select(code > top, beyond, code + sign)
            code = tirx.Select(tirx.isnan(x32), tirx.const(nan, "int32"), code)
            return tirx.reinterpret(to, code.astype("uint8"))

        return te.compute(t.shape, at, name="to_float8")

    return node.te(kernel, x, constant(limits), name="to_float8")
