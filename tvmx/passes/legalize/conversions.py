"""Quantize and dequantize: round half to even, saturate. (TVM's own rounds halves away from zero.)

Sums and products read codes and dequantise them by themselves. A dequantize of its own might end up in the epilogue of
the kernel that made the codes and be written as floats: where the other operand comes from a convolution too, or where
the gate of a squeeze-and-excite block is spread over a large tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmx.passes.legalize.conv import constant_of, static_shape
from tvmx.target import Target

BYTES = ("int8", "uint8")
COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "relax.multiply": operator.mul,
    "relax.add": operator.add,
    "relax.subtract": operator.sub,
}


def legalizers(target: Target) -> tuple[dict[str, Callable[[Any, Any], Any]], ...]:
    """Tables for `legalize_early`, one walk each: nothing may be lowered that a later one looks through."""
    if target.kind != "cpu":
        return ()
    return (
        {"relax.quantize": quantize_spread},
        dict.fromkeys(COMBINED, combine_codes),
        {"relax.quantize": quantize, "relax.dequantize": dequantize},
    )


def quantize(bb: Any, call: Any) -> Any:
    """R.quantize of float32 to 8 bits; None for another."""
    from tvm import te

    rounding = _rounding(bb, call)
    if rounding is None:
        return None
    rounded, operands = rounding

    def compute(x: Any, *rest: Any) -> Any:
        return te.compute(x.shape, lambda *i: rounded(x(*i), rest, i), name="quantize")

    return bb.call_te(compute, call.args[0], *operands, primfunc_name_hint="quantize")


def dequantize(bb: Any, call: Any) -> Any:
    """R.dequantize of 8- to 32-bit codes to float32; None for another."""
    from tvm import te

    scaling = _scaling(bb, call)
    if scaling is None:
        return None
    scaled, operands = scaling

    def compute(x: Any, *rest: Any) -> Any:
        return te.compute(x.shape, lambda *i: scaled(x(*i), rest, i), name="dequantize")

    return bb.call_te(compute, call.args[0], *operands, primfunc_name_hint="dequantize")


def combine_codes(bb: Any, call: Any) -> Any:
    """x + dequantize(codes), or both dequantised, in one kernel; None for another."""
    return _combined(bb, call, None)


def quantize_spread(bb: Any, call: Any) -> Any:
    """quantize(x · dequantize(codes)) with fewer codes than results: FuseOps would keep the two apart."""
    from tvm import relax

    inner = bb.lookup_binding(call.args[0]) if isinstance(call.args[0], relax.Var) else call.args[0]
    rounding = _rounding(bb, call)
    if rounding is None or rounding[1] or _name(inner) not in COMBINED:
        return None
    elements = [math.prod(static_shape(a) or (0,)) for a in (*inner.args, inner)]
    if not any(_codes(bb, a) is not None and 0 < n < elements[2] for a, n in zip(inner.args, elements)):
        return None
    return _combined(bb, inner, rounding[0])


def _combined(bb: Any, call: Any, rounded: Any) -> Any:
    """The call on codes where its operands dequantise some, then `rounded`."""
    from tvm import te

    result = static_shape(call)
    codes = [_codes(bb, a) for a in call.args]
    if result is None or str(call.ty.dtype) != "float32" or codes == [None, None]:
        return None
    scalings = [None if c is None else _scaling(bb, c) for c in codes]
    if any(c is not None and (s is None or s[1]) for c, s in zip(codes, scalings)):
        return None  # a scale per channel: left to the general form
    kind = _name(call).removeprefix("relax.")

    def compute(*tensors: Any) -> Any:
        def operand(k: int, i: tuple[Any, ...]) -> Any:
            at = _index(tensors[k], i, result)
            scaling = scalings[k]
            return tensors[k][at] if scaling is None else scaling[0](tensors[k][at], (), at)

        def value(*i: Any) -> Any:
            found = COMBINED[f"relax.{kind}"](operand(0, i), operand(1, i))
            return found if rounded is None else rounded(found, (), i)

        return te.compute(result, value, name=kind)

    operands = [a if c is None else c.args[0] for a, c in zip(call.args, codes)]
    return bb.call_te(compute, *operands, primfunc_name_hint=kind if rounded is None else f"{kind}_quantize")


def _codes(bb: Any, value: Any) -> Any:
    """The dequantize call behind an operand if it reads computed 8-bit codes, else None."""
    from tvm import relax

    call = bb.lookup_binding(value) if isinstance(value, relax.Var) else value
    if _name(call) != "relax.dequantize" or not isinstance(call.args[0], relax.Var):
        return None
    return call if str(call.args[0].ty.dtype) in BYTES and static_shape(call) is not None else None


def _name(call: Any) -> str:
    return str(getattr(getattr(call, "op", None), "name", ""))


def _index(tensor: Any, index: tuple[Any, ...], result: tuple[int, ...]) -> tuple[Any, ...]:
    """Where a broadcast operand is read for an element of the result. (A zero where nothing is spread hides from
    FuseOps that the kernel is element-wise.)"""
    shape = [int(getattr(d, "value", 0)) for d in tensor.shape]
    skipped = len(index) - len(shape)
    return tuple(0 if d == 1 != n else i for d, i, n in zip(shape, index[skipped:], result[skipped:]))


Rule = Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any]
"""(value, the operands that are no single constants, its index) → the value on the other side."""


def _rounding(bb: Any, call: Any) -> tuple[Rule, list[Any]] | None:
    from tvm import tirx

    dtype, axis = str(call.attrs.out_dtype), int(call.attrs.axis)
    if dtype not in BYTES or str(call.args[0].ty.dtype) != "float32":
        return None
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    scale, zero, operands = _parameters(bb, call)

    def rounded(element: Any, rest: tuple[Any, ...], i: tuple[Any, ...]) -> Any:
        s, z = _at(scale, rest, i, axis), _at(zero, rest, i, axis)
        if not isinstance(s, float):
            element = element / s
        elif s != 1.0:
            element = element / tirx.const(s, "float32")
        if isinstance(z, float):
            bounded = tirx.max(tirx.min(element, tirx.const(high - z, "float32")), tirx.const(low - z, "float32"))
            return to_integer(bounded, int(z)).astype(dtype)
        steps = tirx.nearbyint(element) + z.astype("float32")
        bounded = tirx.max(tirx.min(steps, tirx.const(high, "float32")), tirx.const(low, "float32"))
        return bounded.astype("int32").astype(dtype)

    return rounded, operands


# Added to a float32 below 2^22 in size it leaves the integer next to it, ties to even, in the low bits.
ROUNDER = 12582912.0  # 1.5 · 2^23
ROUNDER_BITS = 0x4B400000


def to_integer(value: Any, plus: int) -> Any:
    """int32 of a float32 of at most 2^22 in size, rounded half to even, plus a constant: two operations on any CPU."""
    from tvm import tirx

    bits = tirx.reinterpret("int32", value + tirx.const(ROUNDER, "float32"))
    return bits - tirx.const(ROUNDER_BITS - plus, "int32")


def _scaling(bb: Any, call: Any) -> tuple[Rule, list[Any]] | None:
    """The difference, which is exact, then one product.

    Of 8-bit codes the difference is taken in int16: TVM's simplifier takes four times as long for each further int32
    difference in a chain of quantize and dequantize, and such chains are ten and more long.
    (In floats a whole network took 3 to 4 % more.)
    """
    from tvm import tirx

    axis, dtype = int(call.attrs.axis), str(call.args[0].ty.dtype)
    if str(call.attrs.out_dtype) != "float32" or not dtype.lstrip("u").startswith("int"):
        return None
    scale, zero, operands = _parameters(bb, call)

    def scaled(code: Any, rest: tuple[Any, ...], i: tuple[Any, ...]) -> Any:
        s, z = _at(scale, rest, i, axis), _at(zero, rest, i, axis)
        wide = "int16" if dtype in BYTES and isinstance(z, float) else "int32"
        offset = tirx.const(int(z), wide) if isinstance(z, float) else z.astype(wide)
        value = (code.astype(wide) - offset).astype("float32")
        return value * (tirx.const(s, "float32") if isinstance(s, float) else s)

    return scaled, operands


def _parameters(bb: Any, call: Any) -> tuple[Any, Any, list[Any]]:
    """(scale, zero, operands): each parameter a float when constant and single, else the index of its operand."""
    operands: list[Any] = []
    found: list[Any] = []
    for arg in call.args[1:3]:
        constant = constant_of(bb, arg)
        if constant is not None and constant.size == 1:
            found.append(float(constant.reshape(())))
        else:
            found.append(len(operands))
            operands.append(arg)
    return found[0], found[1], operands


def _at(parameter: Any, operands: tuple[Any, ...], index: tuple[Any, ...], axis: int) -> Any:
    """The parameter that serves the element at `index`."""
    if isinstance(parameter, float):
        return parameter
    tensor = operands[parameter]
    if all(getattr(d, "value", d) == 1 for d in tensor.shape):
        return tensor[(0,) * len(tensor.shape)]
    return tensor[index[axis]]
