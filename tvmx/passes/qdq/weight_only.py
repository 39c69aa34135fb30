"""matmul(x, w) with float x and a w that constants of 8 bits or fewer are scaled to: the codes stay as they are.

Exporters write such weights as dequantize, as Cast and Mul, or in blocks along K with reshapes around. All become one
form, which the lowering turns into a kernel that dequantises a panel of weights where it multiplies it:

    w[K, N] = reshape((float(codes[K/G, G, N]) - zero[K/G, 1, N]) · scale[K/G, 1, N])

Where G does not divide K, the codes are filled up to whole groups and the reshape is cut to K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.fold import slices_of
from tvmx.passes.qdq.params import RANGE, Dequantized, dequantized
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dims_of, dtype_of, op_name

GROUPS = (16, 32, 64, 128, 256)
MIN_SIZE = 1 << 12  # elements: smaller weights become floats


@dataclass(frozen=True, eq=False)
class ScaledCodes:
    """values = (codes - zero) · scale; `zero` and `scale` broadcast against `codes`, with as many dims."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray

    def map(self, change: Any) -> ScaledCodes:
        """The same change of shape on all three, spread to full size first."""
        shape = self.codes.shape
        return ScaledCodes(
            change(self.codes), change(np.broadcast_to(self.scale, shape)), change(np.broadcast_to(self.zero, shape))
        )

    def values(self) -> np.ndarray:
        return np.asarray((self.codes.astype(np.float32) - self.zero) * self.scale, np.float32)


def scaled_codes(scope: Scope, expr: Any) -> ScaledCodes | None:
    """What constants `expr` is scaled from, if it is."""
    name = op_name(scope.definition(expr))
    call = scope.definition(expr)
    if name == "dequantize":
        return _of_dequantize(scope, expr)
    if name == "astype":
        array = as_array(scope.definition(call.args[0]))
        if array is None or str(array.dtype) not in RANGE or dtype_of(call) != "float32":
            return None
        unit = (1,) * array.ndim
        return ScaledCodes(array, np.ones(unit, np.float32), np.zeros(unit, np.float32))
    if name in ("reshape", "permute_dims", "strided_slice"):
        return _moved(scope, call)
    if name in ("multiply", "subtract", "add"):
        return _arithmetic(scope, call, name)
    return None


def _of_dequantize(scope: Scope, expr: Any) -> ScaledCodes | None:
    found = dequantized(scope, expr)
    if not isinstance(found, Dequantized) or found.params.dtype not in RANGE:
        return None
    codes = as_array(scope.definition(found.codes))
    if codes is None:
        return None
    shape = [1] * codes.ndim
    if found.params.axis is not None:
        shape[found.params.axis] = -1
    return ScaledCodes(codes, found.params.scale.reshape(shape), found.params.zero.reshape(shape).astype(np.float32))


def _moved(scope: Scope, call: Any) -> ScaledCodes | None:
    inner = scaled_codes(scope, call.args[0])
    shape = dims_of(call)
    if inner is None or shape is None or not all(isinstance(d, int) for d in shape):
        return None
    if op_name(call) == "reshape":
        return inner.map(lambda a: a.reshape(shape))
    if op_name(call) == "strided_slice":
        cut = slices_of(call, inner.codes.ndim)
        return None if cut is None else inner.map(lambda a: a[cut])
    axes = call.attrs.axes
    order = None if axes is None else tuple(int(a) % len(shape) for a in axes)
    return inner.map(lambda a: a.transpose(order))


def _arithmetic(scope: Scope, call: Any, name: str) -> ScaledCodes | None:
    inner, constant = scaled_codes(scope, call.args[0]), _constant(scope, call.args[1])
    if (inner is None or constant is None) and name != "subtract":
        inner, constant = scaled_codes(scope, call.args[1]), _constant(scope, call.args[0])
    if inner is None or constant is None or constant.ndim > inner.codes.ndim or dtype_of(call) != "float32":
        return None
    if np.broadcast_shapes(constant.shape, inner.codes.shape) != inner.codes.shape:
        return None
    value = constant.reshape((1,) * (inner.codes.ndim - constant.ndim) + constant.shape).astype(np.float32)
    if name == "multiply":
        return ScaledCodes(inner.codes, inner.scale * value, inner.zero)
    if (inner.scale != 1).any():
        return None
    return ScaledCodes(inner.codes, inner.scale, inner.zero + (value if name == "subtract" else -value))


def _constant(scope: Scope, expr: Any) -> np.ndarray | None:
    """A constant, or one that is only cast: zero points are stored in the type of the codes."""
    cast = scope.call(expr, "astype")
    return as_array(scope.definition(expr if cast is None else cast.args[0]))


def group_size(w: ScaledCodes) -> int | None:
    """The longest run along K (axis 0 of [K, N]) that shares scales; None if there is none of a usual length.

    The last run may be shorter.
    """
    depth = int(w.codes.shape[0])
    for size in (depth, *reversed(GROUPS)):
        if size <= depth and all(_constant_within(a, w.codes.shape, size) for a in (w.scale, w.zero)):
            return size
    return None


def _constant_within(array: np.ndarray, shape: tuple[int, ...], size: int) -> bool:
    if array.shape[0] == 1:
        return True
    full = np.broadcast_to(array, shape)
    return bool((full == full[np.arange(shape[0]) // size * size]).all())


def weight_only(scope: Scope, call: Any) -> Any:
    """matmul(x, scaled codes)."""
    from tvm import relax

    x, w = call.args
    shape = dims_of(w)
    if dtype_of(x) != "float32" or dtype_of(w) != "float32" or shape is None or len(shape) != 2:
        return None
    if as_array(scope.definition(w)) is not None or isinstance(dequantized(scope, x), Dequantized):
        return None
    found = scaled_codes(scope, w)
    if found is None:
        return None
    if _is_canonical(scope, w):
        return None
    refusal = _unfit(call, found)
    if refusal is not None:  # floats, made now: the program would scale the weights at every run
        return relax.op.matmul(x, as_constant(found.values()), dtype_of(call))
    group = group_size(found)
    assert group is not None
    return relax.op.matmul(x, canonical(scope, found, group), dtype_of(call))


def _unfit(call: Any, w: ScaledCodes) -> str | None:
    if w.codes.size < MIN_SIZE:
        return "the weights are small"
    if not all(isinstance(d, int) for d in dims_of(call) or (None,)):
        return "the rows are symbolic"
    return "the scales have no usual group size" if group_size(w) is None else None


def canonical(scope: Scope, w: ScaledCodes, group: int) -> Any:
    """The form of this module's first lines, emitted."""
    from tvm import relax

    depth, width = w.codes.shape
    groups = -(-depth // group)
    whole = np.zeros((groups * group, width), w.codes.dtype)
    whole[:depth] = w.codes

    def per_group(array: np.ndarray) -> np.ndarray:
        return np.broadcast_to(array, (depth, width))[::group][:, None]

    op = relax.op
    codes = scope.emit(op.astype(as_constant(whole.reshape(groups, group, width)), "float32"))
    centred = scope.emit(op.subtract(codes, as_constant(per_group(w.zero).astype(np.float32))))
    scaled = scope.emit(op.multiply(centred, as_constant(per_group(w.scale).astype(np.float32))))
    flat = scope.emit(op.reshape(scaled, (groups * group, width)))
    return flat if depth == groups * group else scope.emit(op.strided_slice(flat, [0], [0], [depth]))


def _is_canonical(scope: Scope, expr: Any) -> bool:
    cut = scope.call(expr, "strided_slice")
    reshape = scope.call(expr if cut is None else cut.args[0], "reshape")
    scaled = None if reshape is None else scope.call(reshape.args[0], "multiply")
    centred = None if scaled is None else scope.call(scaled.args[0], "subtract")
    return centred is not None and scope.call(centred.args[0], "astype") is not None


def keep_or_refuse(scope: Scope, call: Any) -> Any:
    """The rule's body, with the reason where a quantised weight is kept in float."""
    found = weight_only(scope, call)
    quantised = scope.call(call.args[1], "dequantize") is not None
    if found is None and quantised and scaled_codes(scope, call.args[1]) is None:
        return Refusal("the weights are not constant codes of 8 bits")
    return found


RULES = (RewriteRule("weight_only_matmul", ("matmul",), keep_or_refuse),)
