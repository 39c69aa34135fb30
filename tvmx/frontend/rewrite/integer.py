"""ConvInteger and MatMulInteger, exact in int32, and the com.microsoft operators built on them."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.qoperator import attrs_of
from tvmx.frontend.rewrite.qparams import is_zero, scalar
from tvmx.frontend.rewrite.rule import Match, RewriteRule

_EXACT = 1 << 24  # float32 holds every integer up to here
_CONV_ATTRS = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")


def _reach(m: Match, value: int, zero: int) -> int:
    """The largest |x - zero point| that the dtype allows."""
    low, high = (0, 255) if m.elem(value) == TensorProto.UINT8 else (-128, 127)
    if not m.input(zero):
        return max(-low, high)
    known = m.const(zero)
    if known is None:
        return 255
    offset = np.asarray(known, np.int64)
    return int(np.maximum(offset - low, high - offset).max())


def _weight_reach(m: Match) -> np.ndarray:
    """Per input channel of a group, the largest sum over the kernel of |w - zero point|."""
    _, channels, *kernel = m.shape(1)
    weight, zero = m.const(1), m.const(3)
    if weight is None or (zero is None and m.input(3)):
        return np.full(channels, _reach(m, 1, 3) * int(np.prod(kernel)), np.int64)
    w = weight.astype(np.int64)
    if zero is not None:
        w = w - zero.astype(np.int64).reshape(-1, *[1] * (w.ndim - 1))
    by_output = np.abs(w).reshape(*w.shape[:2], -1).sum(2)
    return np.asarray(by_output.max(0))


def _chunks(weights: np.ndarray, budget: int) -> list[tuple[int, int]]:
    """Cut the channels so that each run's reach stays within `budget`."""
    runs, start, total = [], 0, 0
    for channel, reach in enumerate(weights):
        if reach > budget:
            raise Refuse(
                "one kernel window can exceed 24 bits, where float32 is not exact",
                "use a smaller kernel or a float model",
            )
        if total + reach > budget:
            runs.append((start, channel))
            start, total = channel, 0
        total += int(reach)
    return [*runs, (start, len(weights))]


def conv_integer(m: Match) -> list[str]:
    """ConvInteger -> Cast(Conv(Dequantize(x, 1, zx), Dequantize(w, 1, zw))).

    With scale 1 a float32 Conv computes integers; sums that might pass 2^24 are cut into chunks
    of input channels, each exact, added in int32.
    """
    e = m.emit
    group = m.attr("group", 1)
    outputs, per_group = m.dim(1, 0), m.dim(1, 1)
    if m.dim(0, 1) != per_group * group:
        raise Refuse("the channels of input and weight do not fit", "repair the model")
    x = e.dequantize(m.input(0), e.const(np.float32(1), "one"), scalar(m, m.input(2)))
    budget = _EXACT // max(1, _reach(m, 0, 2))
    runs = _chunks(_weight_reach(m), budget)
    attrs = attrs_of(m, _CONV_ATTRS)
    if len(runs) == 1:
        w = _float_weight(m, m.input(1), scalar(m, m.input(3)), outputs)
        y = e.op("Conv", x, w, group=group, **attrs)
        m.graph.integral.add(y)
        return [e.cast(y, TensorProto.INT32)]
    parts = []
    rows = outputs // group
    for g in range(group):
        zero = scalar(m, m.input(3))
        if zero and m.type(zero).shape != ():
            zero = e.slice(zero, 0, g * rows, (g + 1) * rows)
        own = e.slice(m.input(1), 0, g * rows, (g + 1) * rows) if group > 1 else m.input(1)
        total = ""
        for start, end in runs:
            x_c = e.slice(x, 1, g * per_group + start, g * per_group + end)
            w_c = _float_weight(m, e.slice(own, 1, start, end), zero, rows)
            y = e.cast(e.op("Conv", x_c, w_c, **attrs), TensorProto.INT32)
            total = e.add2(total, y) if total else y
        parts.append(total)
    return [e.concat(parts, 1)]


def _float_weight(m: Match, w: str, zero: str, outputs: int) -> str:
    """w - zero as float; `zero` is "", a scalar, or one per output channel."""
    e = m.emit
    if zero and m.type(zero).shape != ():
        return e.dequantize(w, e.const(np.ones(outputs, np.float32), "ones"), zero, 0)
    return e.dequantize(w, e.const(np.float32(1), "one"), zero)


def _no_zero_points(m: Match) -> str | None:
    if not m.input(2) and not m.input(3):
        return "there are no zero points"
    if m.rank(0) < 2 or m.rank(1) < 2:
        return "a vector operand"
    return None


def matmul_integer(m: Match) -> list[str]:
    """(A - za)(B - zb) = AB - za colsum(B) - rowsum(A) zb + K za zb, in int32.

    The product itself then runs on the 8-bit operands; colsum of a constant B folds.
    """
    e = m.emit
    i32 = TensorProto.INT32
    y = e.op("MatMulInteger", m.input(0), m.input(1))
    za, zb = (_zero_point(m, index) for index in (2, 3))
    if za:
        columns = e.reduce_sum(e.op("Cast", m.input(1), to=i32), [-2])
        y = e.sub(y, e.mul(za, columns))
    if zb:
        rows = e.reduce_sum(e.op("Cast", m.input(0), to=i32), [-1])
        if za:
            rows = e.sub(rows, e.mul(za, e.const(m.dim(0, -1), "k", np.int32)))
        y = e.sub(y, e.mul(rows, zb))
    return [y]


def _zero_point(m: Match, index: int) -> str:
    """The zero point in int32, shaped to broadcast against [.., M, N]; "" for zero."""
    if is_zero(m, m.input(index)):
        return ""
    e = m.emit
    zero = scalar(m, m.input(index))
    if m.type(zero).shape != () and len(m.type(zero).shape or ()) == 1:
        zero = e.reshape(zero, (-1, 1) if index == 2 else (1, -1))
    return e.op("Cast", zero, to=TensorProto.INT32)


def _to_float(m: Match, y: str, scale: str, bias: str) -> str:
    e = m.emit
    y = e.mul(e.op("Cast", y, to=TensorProto.FLOAT), scale)
    return e.add2(y, bias) if bias else y


def matmul_integer_to_float(m: Match) -> list[str]:
    """com.microsoft MatMulIntegerToFloat: A, B, a_scale, b_scale, a_zero, b_zero, bias."""
    e = m.emit
    a, b, sa, sb, za, zb, bias = (m.input(k) for k in range(7))
    y = e.op("MatMulInteger", a, b, za, zb)
    return [_to_float(m, y, e.mul(scalar(m, sa), scalar(m, sb)), bias)]


def scaled_integer_product(m: Match, a: str, b: str, scale: str, zero: str) -> str:
    """a @ b for a float `a`, quantised now to uint8, and an 8-bit `b` with scale and zero point."""
    e = m.emit
    q, sa, za = e.ops("DynamicQuantizeLinear", a, outputs=3)
    y = e.op("MatMulInteger", q, b, za, zero)
    return _to_float(m, y, e.mul(sa, scale), "")


def dynamic_quantize_matmul(m: Match) -> list[str]:
    """com.microsoft DynamicQuantizeMatMul: A float, B, b_scale, b_zero, bias."""
    e = m.emit
    a, b, sb, zb, bias = (m.input(k) for k in range(5))
    y = scaled_integer_product(m, a, b, scalar(m, sb), zb)
    return [e.add2(y, bias) if bias else y]


def dynamic_quantize_linear(m: Match) -> list[str]:
    """Scale and zero point from the range of x, zero included; all zeros get scale 1, not 0 / 0.

    ONNX's own function body divides by zero there, ONNX Runtime does as this does.
    """
    e = m.emit
    zero = e.like(0.0, TensorProto.FLOAT, "zero")
    axes = list(range(m.rank(0)))
    if not axes:
        raise Refuse("a scalar input", "give it at least one axis")
    low = e.op("Min", e.reduce_min(m.input(0), axes, keepdims=False), zero)
    high = e.op("Max", e.reduce_max(m.input(0), axes, keepdims=False), zero)
    steps = e.like(255.0, TensorProto.FLOAT, "steps")
    scale = e.div(e.sub(high, low), steps)
    one = e.like(1.0, TensorProto.FLOAT, "one")
    scale = e.op("Where", e.op("Equal", scale, zero), one, scale)
    point = e.op("Round", e.sub(zero, e.div(low, scale)))
    point = e.cast(e.clip(point, 0.0, 255.0, TensorProto.FLOAT), TensorProto.UINT8)
    return [e.quantize(m.input(0), scale, point), scale, point]


def _not_integral(m: Match) -> str | None:
    cast = m.producer(0)
    if m.attr("to") != TensorProto.FLOAT or cast is None or cast.op_type != "Cast":
        return "no cast of a cast to float"
    if cast.input[0] not in m.graph.integral:
        return "the value under the casts may have a fraction"
    return None


RULES = (
    RewriteRule("exact_float_ConvInteger", ("ConvInteger",), conv_integer),
    RewriteRule("guarded_DynamicQuantizeLinear", ("DynamicQuantizeLinear",), dynamic_quantize_linear),
    RewriteRule("zero_points_MatMulInteger", ("MatMulInteger",), matmul_integer, _no_zero_points),
    RewriteRule(
        "integer_MatMulIntegerToFloat",
        ("com.microsoft:MatMulIntegerToFloat",),
        matmul_integer_to_float,
    ),
    RewriteRule(
        "integer_DynamicQuantizeMatMul",
        ("com.microsoft:DynamicQuantizeMatMul",),
        dynamic_quantize_matmul,
    ),
    RewriteRule(
        "cast_of_integral",
        ("Cast",),
        lambda m: [m.producer(0).input[0]],  # type: ignore[union-attr]
        _not_integral,
        required=False,
    ),
)
