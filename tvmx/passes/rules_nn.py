"""Operators that exporters spelled out in primitives become the operator again: one kernel instead of five."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant, scalar
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dims_of, op_name
from tvmx.passes.view import same_dims


def _close(value: float | None, wanted: float) -> bool:
    return value is not None and math.isclose(value, wanted, rel_tol=1e-5)


def _mean(scope: Scope, expr: Any) -> tuple[Any, tuple[int, ...]] | None:
    """(operand, axes) of a mean that keeps its dims."""
    call = scope.call(expr, "mean")
    if call is None or not bool(call.attrs.keepdims) or call.attrs.axis is None:
        return None
    rank = len(dims_of(call) or ())
    return call.args[0], tuple(sorted(int(a) % rank for a in call.attrs.axis))


def _is_square_of(scope: Scope, expr: Any, base: Any) -> bool:
    power = scope.call(expr, "power")
    if power is not None:
        return power.args[0].same_as(base) and scalar(power.args[1]) == 2.0
    square = scope.call(expr, "multiply", "square")
    return square is not None and all(a.same_as(base) for a in square.args)


def layer_norm(scope: Scope, call: Any) -> Any:
    """(x - mean(x)) / sqrt(mean((x - mean(x))²) + eps)  →  layer_norm(x, ones, zeros) over the last axes."""
    from tvm import relax

    root = scope.call(call.args[1], "sqrt")
    centred = scope.call(call.args[0], "subtract")
    if root is None or centred is None:
        return None
    shifted = scope.call(root.args[0], "add")
    mean = _mean(scope, centred.args[1])
    if shifted is None or mean is None:
        return None
    epsilon = scalar(shifted.args[1])
    variance = _mean(scope, shifted.args[0])
    if epsilon is None or variance is None or not mean[0].same_as(centred.args[0]):
        return None
    if not _is_square_of(scope, variance[0], call.args[0]) or variance[1] != mean[1]:
        return Refusal("the divisor is not the deviation of the dividend")
    x, axes = mean
    shape = dims_of(x) or ()
    if axes != tuple(range(len(shape) - len(axes), len(shape))) or not all(isinstance(shape[a], int) for a in axes):
        return Refusal("normalised over other axes than the last")
    if str(x.ty.dtype) != "float32":
        return Refusal("weights and sums of the kernel are float32")
    extents = [shape[a] for a in axes]
    ones, zeros = (as_constant(fill(extents, "float32")) for fill in (np.ones, np.zeros))
    return relax.op.nn.layer_norm(x, ones, zeros, [a - len(shape) for a in axes], epsilon)


def _weights(scope: Scope, norm: Any, expr: Any) -> np.ndarray | None:
    """A constant that broadcasts over a layer_norm's result as its weights do, in their shape."""
    array = as_array(expr)
    wanted = dims_of(norm.args[1]) or ()
    if array is None or any(d != 1 for d in array.shape[: max(array.ndim - len(wanted), 0)]):
        return None
    try:
        return np.broadcast_to(array.reshape(array.shape[max(array.ndim - len(wanted), 0) :]), wanted)
    except ValueError:
        return None


def layer_norm_weights(scope: Scope, call: Any) -> Any:
    """multiply(layer_norm(x, g, b), c)  →  layer_norm(x, g * c, b * c); add(layer_norm(x, g, b), c)  →  … b + c."""
    import tvm

    norm = scope.call(call.args[0], "nn.layer_norm")
    if norm is None:
        return None
    gamma, beta = as_array(norm.args[1]), as_array(norm.args[2])
    constant = _weights(scope, norm, call.args[1])
    if gamma is None or beta is None or constant is None or not same_dims(dims_of(norm) or (), dims_of(call) or ()):
        return None
    if not scope.used_once(call.args[0]):
        return Refusal("the unscaled result is used elsewhere")
    if op_name(call) == "multiply":
        gamma, beta = gamma * constant, beta * constant
    else:
        beta = beta + constant
    args = [norm.args[0], as_constant(gamma), as_constant(beta)]
    return tvm.ir.Call(norm.op, args, norm.attrs, norm.ty_args)


def _factors(scope: Scope, expr: Any, top: bool = True) -> list[Any]:
    """The leaves of a product tree whose inner nodes are used once."""
    call = scope.call(expr, "multiply") if top or scope.used_once(expr) else None
    if call is None:
        return [expr]
    return [leaf for arg in call.args for leaf in _factors(scope, arg, top=False)]


def gelu(scope: Scope, call: Any) -> Any:
    """x * 0.5 * (1 + erf(x / √2)), in any order  →  gelu(x)."""
    from tvm import relax

    factors = [leaf for arg in call.args for leaf in _factors(scope, arg, top=False)]
    gate = next((f for f in factors if _erf_operand(scope, f) is not None), None)
    if gate is None:
        return None
    x = _erf_operand(scope, gate)
    rest = [f for f in factors if not f.same_as(gate)]
    constants = [c for c in map(scalar, rest) if c is not None]
    others = [f for f in rest if scalar(f) is None]
    if len(others) != 1 or not others[0].same_as(x):
        return Refusal("the gate multiplies something else than its own operand") if others else None
    if not _close(math.prod(constants), 0.5):
        return Refusal(f"the product's constant is {math.prod(constants)}, not 0.5")
    return relax.op.nn.gelu(x)


def _erf_operand(scope: Scope, expr: Any) -> Any:
    """x of 1 + erf(x / √2), else None."""
    shifted = scope.call(expr, "add")
    if shifted is None or scalar(shifted.args[1]) != 1.0:
        return None
    erf = scope.call(shifted.args[0], "erf")
    scaled = None if erf is None else scope.call(erf.args[0], "multiply")
    return scaled.args[0] if scaled is not None and _close(scalar(scaled.args[1]), math.sqrt(0.5)) else None


def silu(scope: Scope, call: Any) -> Any:
    """x * sigmoid(x)  →  silu(x)."""
    from tvm import relax

    for x, gate in (call.args, call.args[::-1]):
        sigmoid = scope.call(gate, "sigmoid")
        if sigmoid is not None and sigmoid.args[0].same_as(x):
            return relax.op.nn.silu(x) if scope.used_once(gate) else Refusal("the gate is used elsewhere")
    return None


def mean_of_pool(scope: Scope, call: Any) -> Any:
    """adaptive_avg_pool to one element  →  mean over the spatial axes."""
    from tvm import relax

    size = call.attrs.output_size
    if size is None or any(int(s) != 1 for s in size) or call.attrs.layout not in ("NCW", "NCHW", "NCDHW"):
        return None
    rank = len(dims_of(call) or ())
    return relax.op.mean(call.args[0], list(range(2, rank)), True)


RULES = (
    RewriteRule("layer_norm", ("divide",), layer_norm),
    RewriteRule("layer_norm_weights", ("multiply", "add"), layer_norm_weights),
    RewriteRule("gelu", ("multiply",), gelu),
    RewriteRule("silu", ("multiply",), silu),
    RewriteRule("mean_of_pool", tuple(f"nn.adaptive_avg_pool{n}d" for n in (1, 2, 3)), mean_of_pool),
)
