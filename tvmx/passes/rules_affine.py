"""Constant scales and shifts move into the weights of convolutions and matrix products, or at least meet each other.

Inference-time batch normalisation is `((x - mean) / std) * gamma + beta` with constants; so are the learnt affine
blocks of mobile networks. All become `add(linear(x, w'), b')`. Values differ from the original by float rounding only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant, scalar
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dims_of, dtype_of, op_name
from tvmx.passes.view import same_dims

_CONVS = ("nn.conv1d", "nn.conv2d", "nn.conv3d")
_TRANSPOSED = ("nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose")
LINEAR = (*_CONVS, *_TRANSPOSED, "matmul")
_CHANNELS_FIRST = {"OIW", "OIHW", "OIDHW", "IOW", "IOHW", "IODHW"}


def _float(expr: Any) -> bool:
    return dtype_of(expr) in ("float32", "float64")


def _with_args(call: Any, args: list[Any]) -> Any:
    import tvm

    return tvm.ir.Call(call.op, args, call.attrs, call.ty_args)


def constant_right(scope: Scope, call: Any) -> Any:
    """op(c, x)  →  op(x, c) for commutative op, so that other rules look in one place."""
    if as_array(call.args[0]) is not None and as_array(call.args[1]) is None:
        return _with_args(call, [call.args[1], call.args[0]])
    return None


def divide_by_constant(scope: Scope, call: Any) -> Any:
    """divide(x, c)  →  multiply(x, 1 / c)."""
    from tvm import relax

    c = as_array(call.args[1])
    if c is None or as_array(call.args[0]) is not None or not _float(call):
        return None
    if all(d == 1 for d in dims_of(call) or (None,)) or dims_of(call) == ():
        # One division costs nothing, and the scale of a run-time quantiser, (high - low) / 255, stays exact: one ulp
        # more or less moves values across the rounding of a whole tensor.
        return None
    with np.errstate(all="ignore"):
        inverse = (1 / c.astype("float64")).astype(c.dtype)
    if not np.isfinite(inverse).all() or (np.abs(inverse) < np.finfo(c.dtype).tiny).any():
        return Refusal("a divisor is zero, infinite or has no normal reciprocal")
    return relax.op.multiply(call.args[0], as_constant(inverse))


def subtract_constant(scope: Scope, call: Any) -> Any:
    """subtract(x, c)  →  add(x, -c)."""
    from tvm import relax

    c = as_array(call.args[1])
    if c is None or as_array(call.args[0]) is not None or not _float(call):
        return None
    return relax.op.add(call.args[0], as_constant(-c))


def merge_constants(scope: Scope, call: Any) -> Any:
    """add(add(x, a), b)  →  add(x, a + b); the same for multiply."""
    inner = scope.call(call.args[0], op_name(call))
    if inner is None or not _float(call):
        return None
    a, b = as_array(inner.args[1]), as_array(call.args[1])
    if a is None or b is None:
        return None
    if not scope.used_once(call.args[0]):
        return Refusal("the inner result is used elsewhere")
    if not same_dims(dims_of(inner.args[0]) or (), dims_of(call) or ()):
        return Refusal("a constant widens the tensor")
    merged = a + b if op_name(call) == "add" else a * b
    if merged.size > max(a.size, b.size):
        return Refusal("the constants would become larger")
    return _with_args(call, [inner.args[0], as_constant(merged)])


def neutral(scope: Scope, call: Any) -> Any:
    """x * 1, x + 0, x ** 1  →  x, where the constant does not widen x."""
    c = as_array(call.args[1])
    element = 0 if op_name(call) == "add" else 1
    if c is None or not (c == element).all() or not same_dims(dims_of(call.args[0]) or (), dims_of(call) or ()):
        return None
    return call.args[0]


def constant_power(scope: Scope, call: Any) -> Any:
    """x ** 2  →  x * x;  x ** 0.5  →  sqrt(x); pow itself costs twenty times more."""
    from tvm import relax

    exponent = scalar(call.args[1])
    if exponent not in (2.0, 0.5) or not _float(call) or dims_of(call.args[0]) != dims_of(call):
        return None
    x = call.args[0]
    return relax.op.multiply(x, x) if exponent == 2.0 else relax.op.sqrt(x)


def hoist_scale(scope: Scope, call: Any) -> Any:
    """multiply(x, multiply(y, c))  →  multiply(multiply(x, y), c) for a scalar c, which the next weights may take."""
    from tvm import relax

    if not _float(call) or as_array(call.args[1]) is not None:
        return None
    for x, scaled in (call.args, call.args[::-1]):
        inner = scope.call(scaled, "multiply")
        if inner is None or scalar(inner.args[1]) is None or dims_of(inner) != dims_of(inner.args[0]):
            continue
        if not scope.used_once(scaled):
            return Refusal("the scaled factor is used elsewhere")
        return relax.op.multiply(scope.emit(relax.op.multiply(x, inner.args[0])), inner.args[1])
    return None


def _channel_axis(linear: Any) -> int:
    """The axis of a linear operator's result that its weights' output channels make."""
    rank = len(dims_of(linear) or ())
    return rank - 1 if op_name(linear) == "matmul" else 1


def per_channel(constant: np.ndarray, rank: int, axis: int, extent: int) -> np.ndarray | None:
    """A constant that broadcasts over a tensor of `rank` dims as one value per index of `axis`: [extent], else None."""
    shape = (1,) * (rank - constant.ndim) + constant.shape
    if constant.ndim > rank or any(d != 1 for i, d in enumerate(shape) if i != axis):
        return None
    return np.broadcast_to(constant.reshape(-1), (extent,))


def _linear(scope: Scope, expr: Any) -> tuple[Any, np.ndarray] | None:
    """A convolution or product with constant float weights in the order importers give them."""
    call = scope.call(expr, *LINEAR)
    if call is None or not _float(call):
        return None
    if op_name(call) != "matmul" and call.attrs.kernel_layout not in _CHANNELS_FIRST:
        return None
    w = as_array(call.args[1])
    if w is None or (op_name(call) == "matmul" and w.ndim < 2):
        return None
    return call, w


def _scaled_outputs(call: Any, w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights with each output channel multiplied by `scale` [O]."""
    if op_name(call) == "matmul":
        return np.asarray(w * scale)
    spatial = (1,) * (w.ndim - 2)
    if op_name(call) in _CONVS:
        return np.asarray(w * scale.reshape(-1, 1, *spatial))
    groups = int(call.attrs.groups)  # weights [I, O / groups, ...]: input channel i feeds the outputs of its group
    by_group = np.repeat(scale.reshape(groups, -1), w.shape[0] // groups, axis=0)
    return np.asarray(w * by_group.reshape(*by_group.shape, *spatial))


def _scaled_inputs(call: Any, w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights with each input channel multiplied by `scale` [I]."""
    if op_name(call) == "matmul":
        return np.asarray(w * scale.reshape(-1, 1))
    spatial = (1,) * (w.ndim - 2)
    if op_name(call) in _TRANSPOSED:
        return np.asarray(w * scale.reshape(-1, 1, *spatial))
    groups = int(call.attrs.groups)
    by_group = np.repeat(scale.reshape(groups, -1), w.shape[0] // groups, axis=0)
    return np.asarray(w * by_group.reshape(*by_group.shape, *spatial))


def scale_into_weights(scope: Scope, call: Any) -> Any:
    """multiply(linear(x, w), s)  →  linear(x, w * s), also with a bias: (linear + b) * s  →  linear' + b * s."""
    from tvm import relax

    s = as_array(call.args[1])
    if s is None:
        return None
    shifted = scope.call(call.args[0], "add")
    b = None if shifted is None else as_array(shifted.args[1])
    inner = call.args[0] if shifted is None or b is None else shifted.args[0]
    found = _linear(scope, inner)
    if found is None:
        return None
    linear, w = found
    shape = dims_of(linear)
    if shape is None or not same_dims(shape, dims_of(call) or ()):
        return Refusal("the scale widens the tensor")
    if not (scope.used_once(inner) and scope.used_once(call.args[0])):
        return Refusal("the unscaled result is used elsewhere")
    axis = _channel_axis(linear)
    if not isinstance(shape[axis], int):
        return Refusal("the number of channels is symbolic")
    scale = per_channel(s, len(shape), axis, shape[axis])
    if scale is None:
        return Refusal("the scale is not one value per output channel")
    scaled = _with_args(linear, [linear.args[0], as_constant(_scaled_outputs(linear, w, scale).astype(w.dtype))])
    if b is None:
        return scaled
    product = b * s
    if product.size > max(b.size, s.size):
        return Refusal("scale and shift vary along different axes")
    return relax.op.add(scope.emit(scaled), as_constant(product))


def input_scale_into_weights(scope: Scope, call: Any) -> Any:
    """linear(multiply(x, s), w)  →  linear(x, s * w): zeros of the padding stay zeros."""
    found = _linear(scope, call)
    scaled = scope.call(call.args[0], "multiply")
    s = None if scaled is None else as_array(scaled.args[1])
    if found is None or scaled is None or s is None:
        return None
    _, w = found
    shape = dims_of(call.args[0])
    if op_name(call) == "matmul" and w.ndim != 2:
        return Refusal("batched weights")
    if shape is None or not same_dims(shape, dims_of(scaled.args[0]) or ()):
        return Refusal("the scale widens the tensor")
    if not scope.used_once(call.args[0]):
        return Refusal("the scaled input is used elsewhere")
    axis = len(shape) - 1 if op_name(call) == "matmul" else 1
    scale = per_channel(s, len(shape), axis, shape[axis]) if isinstance(shape[axis], int) else None
    if scale is None:
        return Refusal("the scale is not one value per input channel")
    return _with_args(call, [scaled.args[0], as_constant(_scaled_inputs(call, w, scale).astype(w.dtype))])


def input_shift_into_bias(scope: Scope, call: Any) -> Any:
    """linear(add(x, t), w)  →  add(linear(x, w), t·w), where no padding makes the shift differ at the edges."""
    from tvm import relax

    found = _linear(scope, call)
    shifted = scope.call(call.args[0], "add")
    t = None if shifted is None else as_array(shifted.args[1])
    if found is None or shifted is None or t is None or op_name(call) in _TRANSPOSED:
        return None
    _, w = found
    shape = dims_of(call.args[0])
    if op_name(call) == "matmul" and w.ndim != 2:
        return Refusal("batched weights")
    if op_name(call) != "matmul" and any(int(p) for p in call.attrs.padding):
        return Refusal("the padding is not shifted")
    if shape is None or not same_dims(shape, dims_of(shifted.args[0]) or ()):
        return Refusal("the shift widens the tensor")
    if not scope.used_once(call.args[0]):
        return Refusal("the shifted input is used elsewhere")
    axis = len(shape) - 1 if op_name(call) == "matmul" else 1
    shift = per_channel(t, len(shape), axis, shape[axis]) if isinstance(shape[axis], int) else None
    if shift is None:
        return Refusal("the shift is not one value per input channel")
    exact = _scaled_inputs(call, w.astype("float64"), shift.astype("float64"))
    if op_name(call) == "matmul":
        bias = exact.sum(axis=0)
    else:
        bias = exact.sum(axis=tuple(range(1, w.ndim))).reshape(-1, *(1,) * (w.ndim - 2))
    linear = scope.emit(_with_args(call, [shifted.args[0], call.args[1]]))
    return relax.op.add(linear, as_constant(bias.astype(w.dtype)))


RULES = (
    RewriteRule("constant_right", ("add", "multiply", "maximum", "minimum"), constant_right),
    RewriteRule("divide_by_constant", ("divide",), divide_by_constant),
    RewriteRule("subtract_constant", ("subtract",), subtract_constant),
    RewriteRule("neutral", ("add", "multiply", "power"), neutral),
    RewriteRule("constant_power", ("power",), constant_power),
    RewriteRule("hoist_scale", ("multiply",), hoist_scale),
    RewriteRule("merge_constants", ("add", "multiply"), merge_constants),
    RewriteRule("scale_into_weights", ("multiply",), scale_into_weights),
    RewriteRule("input_scale_into_weights", LINEAR, input_scale_into_weights),
    RewriteRule("input_shift_into_bias", LINEAR, input_shift_into_bias),
)
