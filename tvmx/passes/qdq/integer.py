"""op(dequantize(x), dequantize(w))  →  the integer operator with its int32 sums scaled to floats.

What follows (bias, residual, activation, quantize) is element-wise and becomes the integer kernel's epilogue when
kernels are fused: no float tensor is written.

    sum (x - zx)(w - zw) = sum x·(w - zw) - zx · sum (w - zw)      the last term is a constant per output channel
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.legalize.dot_unit import fits_pairs
from tvmx.passes.legalize.integer_model import Work, float_cycles, integer_cycles, widening_cycles
from tvmx.passes.qdq.params import RANGE, Dequantized, QParams, dequantized, fits
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dims_of, dtype_of
from tvmx.target import Target

EXACT_FLOAT = 1 << 24
MIN_TRANSPOSED = 8  # channels of a transposed convolution's result


def integer_conv(scope: Scope, call: Any, target: Target) -> Any:
    """conv2d over NHWC. Where `target` has a float32 kernel that is clearly faster, the rounded values are multiplied
    in float32 instead: what Q and DQ mean stays as it is."""
    from tvm import relax

    found = _convolution(scope, call)
    if isinstance(found, Refusal):
        return found
    x, weights, scales = found
    refusal = slower(scope, call, x, weights, target)
    if refusal is not None:
        return refusal
    data, params = x.codes, x.params
    pads = [int(p) for p in call.attrs.padding]
    if any(pads):
        widths = [0, 0, pads[0], pads[2], pads[1], pads[3], 0, 0]
        data = scope.emit(relax.op.nn.pad(data, widths, "constant", float(params.zero)))
    sums = convolve(scope, call, data, weights)
    if isinstance(sums, Refusal):
        return sums
    return scaled(scope, sums, -int(params.zero) * weights.sum((0, 1, 2)), scales)


def convolve(scope: Scope, call: Any, data: Any, weights: np.ndarray) -> Any:
    """The convolution `call` over codes that are padded already: int32 sums, or exact floats of a depthwise window."""
    from tvm import relax

    attrs = call.attrs
    _, _, mine, out = weights.shape
    groups = int(attrs.groups)
    depthwise = groups > 1 and mine == 1 and out == groups
    if depthwise and _bound(weights) >= EXACT_FLOAT:
        return Refusal("a depthwise window of more than 2^24 is not exact")
    return scope.emit(
        relax.op.nn.conv2d(
            data,
            as_constant(weights.astype("int8" if fits(weights, "int8") else "int16")),
            strides=attrs.strides,
            padding=[0, 0, 0, 0],
            dilation=attrs.dilation,
            groups=groups,
            data_layout="NHWC",
            kernel_layout="HWIO",
            out_dtype="float32" if depthwise else "int32",
        )
    )


def _bound(weights: np.ndarray) -> int:
    """What no sum of 8-bit codes by these weights HWIO exceeds."""
    return int(np.abs(weights).sum((0, 1, 2)).max(initial=0)) * 255


def _convolution(scope: Scope, call: Any) -> tuple[Dequantized, np.ndarray, np.ndarray] | Refusal:
    """(input, weights HWIO less their zero points, scales of the sums) of a convolution over NHWC."""
    x = dequantized(scope, call.args[0])
    found = constant_weights(scope, call, x)
    if isinstance(found, Refusal):
        return found
    assert isinstance(x, Dequantized)
    return x, *found


def constant_weights(scope: Scope, call: Any, x: Any) -> tuple[np.ndarray, np.ndarray] | Refusal:
    """(weights HWIO less their zero points, scales of the sums) of a convolution over NHWC that reads `x`."""
    w = dequantized(scope, call.args[1])
    refusal = _operands(x, w)
    if refusal is not None:
        return refusal
    assert isinstance(w, Dequantized)
    if (call.attrs.data_layout, call.attrs.kernel_layout) != ("NHWC", "HWIO"):
        return Refusal(f"layout {call.attrs.data_layout}, {call.attrs.kernel_layout} has no integer kernel")
    codes = as_array(scope.definition(w.codes))
    if codes is None:
        return Refusal("the weights are not constant")
    if w.params.axis not in (None, 3):
        return Refusal(f"weights are scaled along axis {w.params.axis}, not per output channel")
    if not all(isinstance(d, int) for d in dims_of(x.codes) or (None,)):
        return Refusal("a dimension of the input is symbolic")
    scale, zero = w.params.along(codes.shape[3])
    weights = codes.astype(np.int64) - zero
    if _bound(weights) >= 1 << 31:
        return Refusal("the sums may leave int32")
    return weights, x.params.scale.astype(np.float64) * scale.astype(np.float64)


FLOAT_GAIN = 1.25  # by the model, before codes are widened for a float32 kernel


def slower(scope: Scope, call: Any, x: Dequantized, weights: np.ndarray, target: Target) -> Refusal | None:
    """Only Winograd beats integers, and only without a unit that adds four products a lane and step."""
    if target.kind != "cpu":
        return None
    attrs = call.attrs
    ones = (*attrs.strides, *attrs.dilation, attrs.groups)
    before, after = dims_of(x.codes), dims_of(call)
    kh, kw, depth, channels = weights.shape
    if (kh, kw) != (3, 3) or any(int(v) != 1 for v in ones) or before is None or after is None:
        return None
    small = fits(weights, "int8") and fits_pairs(weights)
    inputs = int(np.prod(before))
    work = Work(after[0], after[1], after[2], depth, channels, (3, 3), inputs=inputs, weights=weights.size, small=small)
    wide = float_cycles(work, target) + widening_cycles(inputs, target)
    narrow = integer_cycles(work, target)
    if narrow <= wide * FLOAT_GAIN:
        return None
    return Refusal(f"slower than in float32 by the model: {narrow:.0f} cycles against {wide:.0f}")


def integer_transpose(scope: Scope, call: Any) -> Any:
    """conv2d_transpose over NHWC, one group; the zero point is taken off the data, which the kernel undoes."""
    from tvm import relax

    found = _convolution(scope, call)
    if isinstance(found, Refusal):
        return found
    x, weights, scales = found
    attrs = call.attrs
    if int(attrs.groups) != 1 or any(int(d) != 1 for d in attrs.dilation):
        return Refusal("groups and dilation have no integer kernel")
    if weights.shape[3] < MIN_TRANSPOSED:
        return Refusal("moving few channels to their places costs more than the product saves")
    sums = scope.emit(
        relax.op.nn.conv2d_transpose(
            centred(scope, x, through=False),
            as_constant(weights.astype("int8" if fits(weights, "int8") else "int16")),
            strides=attrs.strides,
            padding=attrs.padding,
            output_padding=attrs.output_padding,
            data_layout="NHWC",
            kernel_layout="HWIO",
            out_dtype="int32",
        )
    )
    return scaled(scope, sums, np.zeros(1, np.int64), scales)


def integer_matmul(scope: Scope, call: Any) -> Any:
    """matmul of two dequantised operands, the right one constant or computed."""
    a, b = (dequantized(scope, arg) for arg in call.args)
    refusal = _operands(a, b)
    if refusal is not None:
        return refusal
    assert isinstance(a, Dequantized)
    assert isinstance(b, Dequantized)
    rank = len(dims_of(b.codes) or ())
    if rank < 2 or len(dims_of(a.codes) or ()) < 2:
        return Refusal("a vector operand")
    if b.params.axis not in (None, rank - 1):
        return Refusal(f"the right operand is scaled along axis {b.params.axis}, which is summed over")
    if not all(isinstance(d, int) for e in (a.codes, b.codes, call) for d in dims_of(e) or (None,)):
        return Refusal("a dimension is symbolic")
    n = int((dims_of(call) or ())[-1])
    scale, zero = b.params.along(n)
    scales = a.params.scale.astype(np.float64) * scale.astype(np.float64)
    codes = as_array(scope.definition(b.codes))
    if codes is None and b.params.axis is not None:
        return Refusal("a computed right operand is scaled per column")
    if codes is not None and codes.ndim == 2:
        weights = codes.astype(np.int64) - zero
        if int(np.abs(weights).sum(0).max(initial=0)) * 255 >= 1 << 31:
            return Refusal("the sums may leave int32")
        from tvm import relax

        constant = as_constant(weights.astype("int8" if fits(weights, "int8") else "int16"))
        sums = scope.emit(relax.op.matmul(a.codes, constant, "int32"))
        return scaled(scope, sums, -int(a.params.zero) * weights.sum(0), scales)
    return _dynamic_matmul(scope, a, b, scales)


def _dynamic_matmul(scope: Scope, a: Dequantized, b: Dequantized, scales: np.ndarray) -> Any:
    """Both operands computed: codes less their zero points, which the kernel corrects by sums over rows and columns."""
    from tvm import relax

    sums = scope.emit(relax.op.matmul(centred(scope, a), centred(scope, b), "int32"))
    return scaled(scope, sums, np.zeros(1, np.int64), scales)


def centred(scope: Scope, x: Dequantized, through: bool = True) -> Any:
    """codes - zero in int16; below a transpose of the last two axes, so that the kernel still sees that.

    Another transpose (of heads), and any with `through` False, moves the codes themselves.
    """
    from tvm import relax

    codes, swap = x.codes, None
    transpose = scope.call(codes, "permute_dims")
    rank = len(dims_of(codes) or ())
    if transpose is not None and rank >= 2 and through:
        axes = transpose.attrs.axes
        order = [*range(rank)][::-1] if axes is None else [int(a) % rank for a in axes]
        if order[-2] == rank - 1:  # what was contiguous is no longer
            swap = [*range(rank - 2), rank - 1, rank - 2]
            below = [*order[:-2], order[-1], order[-2]]
            codes = transpose.args[0]
            if below != [*range(rank)]:
                codes = scope.emit(relax.op.permute_dims(codes, below))
    wide = scope.emit(relax.op.astype(codes, "int16"))
    if int(x.params.zero):
        wide = scope.emit(relax.op.subtract(wide, relax.const(int(x.params.zero), "int16")))
    return wide if swap is None else scope.emit(relax.op.permute_dims(wide, swap))


def shift(scope: Scope, codes: Any, dtype: str) -> Any:
    """uint8 → int8 by -128, or back; the same bits but the highest."""
    from tvm import relax

    wide = scope.emit(relax.op.astype(codes, "int16"))
    moved = scope.emit(relax.op.add(wide, relax.const(128 if dtype == "uint8" else -128, "int16")))
    return relax.op.astype(moved, dtype)


def shifted(scope: Scope, expr: Any) -> Any | None:
    """The codes under a `shift`, else None."""
    cast = scope.call(expr, "astype")
    if cast is None or dtype_of(cast) not in RANGE:
        return None
    add = scope.call(cast.args[0], "add")
    if add is None or dtype_of(add) != "int16":
        return None
    amount = as_array(add.args[1])
    wide = scope.call(add.args[0], "astype")
    if amount is None or amount.size != 1 or wide is None or dtype_of(wide.args[0]) not in RANGE:
        return None
    expected = 128 if dtype_of(cast) == "uint8" else -128
    return wide.args[0] if int(amount.reshape(())) == expected and dtype_of(wide.args[0]) != dtype_of(cast) else None


def _operands(x: Any, w: Any) -> Refusal | None:
    """Why the operands are no pair of dequantised 8-bit tensors."""
    if x is None and w is None:
        return Refusal("neither operand is quantised")
    for name, operand in (("input", x), ("weights", w)):
        if operand is None:
            return Refusal(f"the {name} are float" if name == "weights" else "the input is float")
        if isinstance(operand, Refusal):
            return operand
        if operand.params.dtype not in RANGE:
            return Refusal(f"the {name} codes are {operand.params.dtype}, not 8-bit")
    if not x.params.per_tensor:
        return Refusal("the input is scaled per channel")
    return None


def scaled(scope: Scope, sums: Any, offset: np.ndarray, scales: np.ndarray) -> Any:
    """(sums + offset) · scales in float32; `sums` are int32 or exact floats."""
    from tvm import relax

    if offset.any():
        sums = scope.emit(relax.op.add(sums, as_constant(offset.astype(dtype_of(sums)))))
    if dtype_of(sums) != "float32":
        sums = scope.emit(relax.op.astype(sums, "float32"))
    factor = scales.astype(np.float32)
    return relax.op.multiply(sums, as_constant(factor[0] if (factor == factor[0]).all() else factor))


def matmul_of_casts(scope: Scope, call: Any) -> Any:
    """matmul(int32(a), int32(b)) of 8-bit a and b, as MatMulInteger imports, without widening the operands."""
    from tvm import relax

    if dtype_of(call) != "int32":
        return None
    a, b = (_narrow(scope, arg) for arg in call.args)
    if a is None or b is None:
        return None
    if dtype_of(a) not in RANGE:
        return Refusal("the left operand is wider than 8 bits")
    if not all(isinstance(d, int) for e in (a, b, call) for d in dims_of(e) or (None,)):
        return Refusal("a dimension is symbolic")
    if any(len(dims_of(e) or ()) < 2 for e in (a, b)):
        return Refusal("a vector operand")
    constant = as_array(b)
    if constant is not None and constant.ndim == 2:
        if dtype_of(b) == "uint8":  # 128 less, and the rows' sums make up for it
            moved = scope.emit(
                relax.op.matmul(a, as_constant((constant.astype(np.int16) - 128).astype(np.int8)), "int32")
            )
            rows = scope.emit(relax.op.sum(scope.emit(relax.op.astype(a, "int32")), [-1], True))
            return relax.op.add(moved, scope.emit(relax.op.multiply(rows, relax.const(128, "int32"))))
        return relax.op.matmul(a, b, "int32")
    if dtype_of(b) not in RANGE:
        return Refusal("the right operand is wider than 8 bits")
    operands = [Dequantized(e, QParams(_ONE, _ZERO, None, dtype_of(e))) for e in (a, b)]
    return relax.op.matmul(*(centred(scope, o) for o in operands), "int32")


_ONE, _ZERO = np.ones((), np.float32), np.zeros((), np.int64)


def _narrow(scope: Scope, expr: Any) -> Any | None:
    """The 8-bit tensor under a cast to int32, or a constant int32 that 8 or 9 bits hold."""
    cast = scope.call(expr, "astype")
    if cast is not None and dtype_of(cast.args[0]) in RANGE:
        return cast.args[0]
    array = as_array(scope.definition(expr))
    if array is None:
        return None
    for dtype in ("int8", "uint8", "int16"):
        if fits(array, dtype) and (dtype != "int16" or np.abs(array).max(initial=0) <= 510):
            return as_constant(array.astype(dtype))
    return None


def rules(target: Target) -> tuple[RewriteRule, ...]:
    """The rules of this module, in order."""
    return (
        RewriteRule("integer_conv2d", ("nn.conv2d",), lambda scope, call: integer_conv(scope, call, target)),
        RewriteRule("integer_transpose", ("nn.conv2d_transpose",), integer_transpose),
        RewriteRule("integer_matmul", ("matmul",), integer_matmul),
        RewriteRule("matmul_of_casts", ("matmul",), matmul_of_casts),
    )
