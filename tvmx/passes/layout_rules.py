"""How each operator works on stored tensors: `rule(emitter, call)` gives the result's record, or None to refuse.

A refusal means: bring the operands to their logical order and keep the operator as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvmx.passes.layout import Emitter, Root, Value, dims_of
from tvmx.passes.view import Axes, covers, follow, identity, is_one, logical_of, same_dims, storage_order

Rule = Callable[[Emitter, Any], "Value | list[Value] | None"]

# Logical (channels-first) axes in storage order, by rank; a rank-3 tensor is stored as an image of height 1, so that
# 1-d convolutions and pools share the kernels and schedules of the 2-d ones.
CHANNELS_LAST: dict[int, Axes] = {3: (0, None, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
FROM_CHANNELS_LAST: dict[int, Axes] = {3: (0, 3, 2), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
WEIGHTS_LAST: dict[int, Axes] = {3: (None, 2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}  # OI* → *IO
TRANSPOSED_WEIGHTS_LAST: dict[int, Axes] = {3: (None, 2, 0, 1), 4: (2, 3, 0, 1)}  # IO* → *IO
DATA_LAYOUT = {3: "NHWC", 4: "NHWC", 5: "NDHWC"}
KERNEL_LAYOUT = {3: "HWIO", 4: "HWIO", 5: "DHWIO"}
CHANNELS_FIRST = {"NCW", "NCHW", "NCDHW"}
WEIGHTS_FIRST = {"OIW", "OIHW", "OIDHW", "IOW", "IOHW"}


def _ints(values: Any) -> list[int]:
    return [int(v) for v in values]


def _lift(values: Any, rank: int, fill: int) -> list[int]:
    """Per-axis attributes of a 1-d operator as those of the 2-d one that runs it."""
    found = _ints(values)
    return [fill, *found] if rank == 3 else found


def _lift_padding(padding: Any, rank: int) -> list[int]:
    found = _ints(padding)
    return [0, found[0], 0, found[-1]] if rank == 3 else found


def conv(em: Emitter, call: Any) -> Value | None:
    """conv1d, conv2d, conv3d. Non-constant weights are transposed at run time.

    An image of one column under a one-column kernel is turned into one of one row, for nothing: kernels vectorise over
    channels and hold a run of columns in registers.
    """
    from tvm import relax

    x, w, a = em.value(call.args[0]), em.value(call.args[1]), call.attrs
    if x is None or w is None or a.data_layout not in CHANNELS_FIRST or a.kernel_layout not in WEIGHTS_FIRST:
        return None
    rank = len(x.shape)
    make = relax.op.nn.conv3d if rank == 5 else relax.op.nn.conv2d
    strides, dilation = _lift(a.strides, rank, 1), _lift(a.dilation, rank, 1)
    padding = _lift_padding(a.padding, rank)
    stored, weights, result = CHANNELS_LAST[rank], WEIGHTS_LAST[rank], FROM_CHANNELS_LAST[rank]
    if rank == 4 and is_one(x.shape[3]) and is_one(w.shape[3]) and padding[1] == padding[3] == 0:
        stored, weights, result = (0, 3, 2, 1), (3, 2, 1, 0), (0, 3, 2, 1)
        strides, dilation = strides[::-1], dilation[::-1]
        padding = [padding[1], padding[0], padding[3], padding[2]]
    made = make(
        em.form(x, stored),
        em.form(w, weights),
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=int(a.groups),
        data_layout=DATA_LAYOUT[rank],
        kernel_layout=KERNEL_LAYOUT[rank],
        out_dtype=a.out_dtype or None,
    )
    return em.result(made, result)


def agreement(em: Emitter, call: Any) -> Value | None:
    """memory.view to other names of the same dims (see `tvmx.frontend.agree`): they are renamed where they lie."""
    from tvm import relax

    value, target = em.value(call.args[0]), dims_of(call)
    if value is None or target is None or len(target) != len(value.shape):
        return None
    stored = list(value.root.shape)
    for axis, dim in zip(value.axes, target):
        if axis is not None:
            stored[axis] = dim
    view = em.emit(relax.op.memory.view(value.root.expr, relax.ShapeExpr(stored)))
    return Value(Root(view, tuple(stored)), target, value.axes)


def conv_transpose(em: Emitter, call: Any) -> Value | None:
    """conv1d_transpose and conv2d_transpose, where a legalization of ours knows the NHWC form (TVM's does not)."""
    from tvm import relax

    x, w, a = em.value(call.args[0]), em.value(call.args[1]), call.attrs
    if x is None or w is None or a.data_layout not in CHANNELS_FIRST or a.kernel_layout not in WEIGHTS_FIRST:
        return None
    if "relax.nn.conv2d_transpose" not in em.legalized:
        return None
    rank = len(x.shape)
    result = relax.op.nn.conv2d_transpose(
        em.form(x, CHANNELS_LAST[rank]),
        em.form(w, TRANSPOSED_WEIGHTS_LAST[rank]),
        strides=_lift(a.strides, rank, 1),
        padding=_lift_padding(a.padding, rank),
        output_padding=_lift(a.output_padding, rank, 0),
        dilation=_lift(a.dilation, rank, 1),
        groups=int(a.groups),
        data_layout="NHWC",
        kernel_layout="HWIO",
        out_dtype=a.out_dtype or None,
    )
    return em.result(result, FROM_CHANNELS_LAST[rank])


def pool(em: Emitter, call: Any) -> Value | None:
    """max_pool and avg_pool, 1-d to 3-d."""
    from tvm import relax

    x, a = em.value(call.args[0]), call.attrs
    if x is None or a.layout not in CHANNELS_FIRST or a.out_layout != a.layout:
        return None
    rank = len(x.shape)
    kind = call.op.name.rsplit(".", 1)[1][: len("max_pool")]
    make = getattr(relax.op.nn, f"{kind}{max(rank - 2, 2)}d")
    result = make(
        em.form(x, CHANNELS_LAST[rank]),
        pool_size=_lift(a.pool_size, rank, 1),
        strides=_lift(a.strides, rank, 1),
        padding=_lift_padding(a.padding, rank),
        dilation=_lift(a.dilation, rank, 1),
        ceil_mode=bool(a.ceil_mode),
        count_include_pad=bool(a.count_include_pad),
        layout=DATA_LAYOUT[rank],
    )
    return em.result(result, FROM_CHANNELS_LAST[rank])


def adaptive_pool(em: Emitter, call: Any) -> Value | None:
    """adaptive_avg_pool1d and 2d. (TVM's 3-d kernel knows NCDHW only.)"""
    from tvm import relax

    x, a = em.value(call.args[0]), call.attrs
    if x is None or a.layout not in CHANNELS_FIRST or a.out_layout != a.layout or len(x.shape) == 5:
        return None
    rank = len(x.shape)
    size = None if a.output_size is None else _lift(a.output_size, rank, 1)
    result = relax.op.nn.adaptive_avg_pool2d(em.form(x, CHANNELS_LAST[rank]), size, layout="NHWC")
    return em.result(result, FROM_CHANNELS_LAST[rank])


def resize(em: Emitter, call: Any) -> Value | None:
    """image.resize2d."""
    from tvm import relax

    x, a = em.value(call.args[0]), call.attrs
    if x is None or a.layout != "NCHW":
        return None
    result = relax.op.image.resize2d(
        em.form(x, CHANNELS_LAST[4]),
        call.args[1],
        roi=tuple(float(r) for r in a.roi),
        layout="NHWC",
        method=a.method,
        coordinate_transformation_mode=a.coordinate_transformation_mode,
        rounding_method=a.rounding_method,
        cubic_alpha=float(a.cubic_alpha),
        cubic_exclude=int(a.cubic_exclude),
        extrapolation_value=float(a.extrapolation_value),
        out_dtype=a.out_dtype or None,
    )
    return em.result(result, FROM_CHANNELS_LAST[4])


def _again(call: Any, args: list[Any]) -> Any:
    """The same operator with the same attributes on other arguments."""
    import tvm

    return tvm.ir.Call(call.op, args, call.attrs, call.ty_args)


def leader(values: list[Value], shape: tuple[Any, ...]) -> Value | None:
    """The operand whose storage an element-wise operator takes over: one that holds every long axis of the result.

    Among several, one whose long axes are not in logical order: a convolution or a transpose chose that order, and
    the others may follow for nothing. Among those, the one made last: it is the one the operator can be fused with,
    while an older one (a residual) lies in memory and can be viewed in any shape.
    """
    full = [v for v in values if len(v.shape) == len(shape) and same_dims(v.shape, shape) and covers(v.shape, v.axes)]
    variable = [v for v in full if not v.is_constant] or full
    moved = [v for v in variable if _is_moved(v)] or variable
    return max(moved, key=lambda v: v.root.serial, default=None)


def _is_moved(value: Value) -> bool:
    order = storage_order(value.shape, logical_of(value.axes, value.rank))
    return list(order) != sorted(order)


def elementwise(em: Emitter, call: Any) -> Value | None:
    """Unary and broadcasting n-ary operators: all operands follow the leader's storage."""
    from tvm import relax

    from tvmx.passes.layout import dims_of

    shape = dims_of(call)
    tensors = [i for i, arg in enumerate(call.args) if isinstance(arg.ty, relax.TensorType)]
    values = {i: em.value(call.args[i]) for i in tensors}
    if shape is None or any(v is None for v in values.values()):
        return None
    known = [v for v in values.values() if v is not None]
    lead = leader(known, shape)
    if lead is None or (lead.axes == identity(len(shape)) and lead.rank == len(shape)):
        return None
    args = list(call.args)
    for i, value in values.items():
        assert value is not None
        # A scalar fits any storage, but may itself be a reshape that is only recorded so far.
        args[i] = em.form(value, follow(lead.axes, lead.rank, len(value.shape))) if value.shape else em.logical(value)
    return em.result(_again(call, args), lead.axes)


def permute(em: Emitter, call: Any) -> Value | None:
    """permute_dims moves nothing: only the record changes."""
    x = em.value(call.args[0])
    if x is None:
        return None
    axes = call.attrs.axes
    rank = len(x.shape)
    return x.permuted(tuple(reversed(range(rank))) if axes is None else tuple(int(a) % rank for a in axes))


def reshape(em: Emitter, call: Any) -> Value | None:
    """reshape, flatten, squeeze, expand_dims: in storage where the merged axes are neighbours there."""
    from tvmx.passes.layout import dims_of

    x, shape = em.value(call.args[0]), dims_of(call)
    if x is None or shape is None:
        return None
    return em.reshaped(x, shape)


def _stored_axis(x: Value, axis: Any) -> int | None:
    return x.axes[int(axis) % len(x.shape)]


def reduction(em: Emitter, call: Any) -> Value | None:
    """sum, mean, max, min, prod, std, variance, argmax, argmin over given axes."""
    from tvm import relax

    x, a = em.value(call.args[0]), call.attrs
    if x is None or a.axis is None:
        return None
    single = isinstance(a.axis, int)
    logical = [int(v) % len(x.shape) for v in ([a.axis] if single else a.axis)]
    stored = [x.axes[v] for v in logical]
    if any(s is None for s in stored):
        return None
    keep = bool(a.keepdims)
    make = getattr(relax.op, call.op.name.removeprefix("relax."))
    axis = [s for s in stored if s is not None]
    result = make(x.root.expr, axis[0] if single else sorted(axis), keep)
    if keep:
        return em.result(result, x.axes)
    left = [axis_ for i, axis_ in enumerate(x.axes) if i not in logical]
    return em.result(result, tuple(None if s is None else s - sum(r < s for r in axis) for s in left))


def along_axis(em: Emitter, call: Any) -> Value | None:
    """softmax, log_softmax, cumsum, cumprod: one axis, same shape."""
    from tvm import relax

    x, a = em.value(call.args[0]), call.attrs
    if x is None or a.axis is None:
        return None
    axis = _stored_axis(x, a.axis)
    if axis is None:
        return None
    name = call.op.name.removeprefix("relax.")
    if name.startswith("nn."):
        return em.result(getattr(relax.op.nn, name[3:])(x.root.expr, axis), x.axes)
    made = getattr(relax.op, name)(x.root.expr, axis, a.dtype or None, bool(a.exclusive))
    return em.result(made, x.axes)


def concat(em: Emitter, call: Any) -> Value | None:
    """All operands follow the first that is not in its logical order."""
    from tvm import relax

    if not isinstance(call.args[0], relax.Tuple):
        return None
    values = [em.value(field) for field in call.args[0].fields]
    known = [v for v in values if v is not None]
    if len(known) != len(values) or call.attrs.axis is None:
        return None
    axis = int(call.attrs.axis) % len(known[0].shape)
    candidates = [
        v for v in known if v.axes[axis] is not None and covers(v.shape, v.axes) and v.axes != identity(len(v.shape))
    ]
    for lead in sorted(candidates, key=lambda v: v.is_constant):
        want = logical_of(lead.axes, lead.rank)
        if all(all(i in want or is_one(d) for i, d in enumerate(v.shape)) for v in known):
            exprs = [em.form(v, want) for v in known]
            return em.result(relax.op.concat(exprs, lead.axes[axis]), lead.axes)
    return None


def split(em: Emitter, call: Any) -> list[Value] | None:
    """split gives a tuple; each part is stored as the whole was."""
    from tvm import relax, tirx

    from tvmx.passes.layout import Root, dims_of

    x, a = em.value(call.args[0]), call.attrs
    axis = None if x is None else _stored_axis(x, a.axis)
    if x is None or axis is None:
        return None
    parts = a.indices_or_sections
    sections = int(parts) if isinstance(parts, (int, tirx.IntImm)) else _ints(parts)
    whole = em.emit(relax.op.split(x.root.expr, sections, axis))
    found = []
    for i in range(len(whole.ty.fields)):
        var = em.emit(relax.TupleGetItem(whole, i))
        stored = dims_of(var)
        if stored is None:
            return None
        shape = tuple(1 if ax is None else stored[ax] for ax in x.axes)
        found.append(Value(Root(var, stored), shape, x.axes))
    return found


def strided_slice(em: Emitter, call: Any) -> Value | None:
    """Static slices; the sliced axes keep their places."""
    from tvm import relax, tirx

    x = em.value(call.args[0])
    if x is None or not all(isinstance(arg, relax.Tuple) for arg in call.args[1:]):
        return None
    logical = [int(v) for v in call.args[1].fields if isinstance(v, (int, tirx.IntImm))]
    stored = [_stored_axis(x, v) for v in logical]
    if len(logical) != len(call.args[1].fields) or any(s is None for s in stored):
        return None
    bounds = [list(arg.fields) for arg in call.args[2:]]
    result = relax.op.strided_slice(x.root.expr, stored, *bounds, assume_inbound=bool(call.attrs.assume_inbound))
    return em.result(result, x.axes)


def pad(em: Emitter, call: Any) -> Value | None:
    """nn.pad: widths follow their axes."""
    from tvm import relax

    x, a = em.value(call.args[0]), call.attrs
    if x is None:
        return None
    widths = _ints(a.pad_width)
    stored = [0] * (2 * x.rank)
    for i, axis in enumerate(x.axes):
        pair = widths[2 * i : 2 * i + 2]
        if axis is not None:
            stored[2 * axis : 2 * axis + 2] = pair
        elif any(pair):
            return None
    return em.result(relax.op.nn.pad(x.root.expr, stored, a.pad_mode, float(a.pad_value)), x.axes)


def layer_norm(em: Emitter, call: Any) -> Value | None:
    """layer_norm and rms_norm over one axis (over several, the weights' axis order would have to follow)."""
    from tvm import relax

    x, a = em.value(call.args[0]), call.attrs
    if x is None or len(a.axes) != 1:
        return None
    axis = _stored_axis(x, a.axes[0])
    if axis is None:
        return None
    weights = [em.value(arg) for arg in call.args[1:]]
    exprs = [em.logical(w) for w in weights if w is not None]
    if len(exprs) != len(weights):
        return None
    if call.op.name == "relax.nn.rms_norm":
        return em.result(relax.op.nn.rms_norm(x.root.expr, *exprs, [axis], float(a.epsilon)), x.axes)
    made = relax.op.nn.layer_norm(x.root.expr, *exprs, [axis], float(a.epsilon), bool(a.center), bool(a.scale))
    return em.result(made, x.axes)


def channel_norm(em: Emitter, call: Any) -> Value | None:
    """instance_norm and group_norm: a channel axis and reduced axes."""
    from tvm import relax

    x, a = em.value(call.args[0]), call.attrs
    if x is None:
        return None
    channel = _stored_axis(x, a.channel_axis)
    axes = [_stored_axis(x, v) for v in a.axes]
    weights = [em.value(arg) for arg in call.args[1:]]
    if channel is None or any(v is None for v in axes) or any(w is None for w in weights):
        return None
    exprs = [em.logical(w) for w in weights if w is not None]
    reduced = sorted(v for v in axes if v is not None)
    options = (channel, reduced, float(a.epsilon), bool(a.center), bool(a.scale))
    if call.op.name == "relax.nn.group_norm":
        return em.result(relax.op.nn.group_norm(x.root.expr, *exprs, int(a.num_groups), *options), x.axes)
    return em.result(relax.op.nn.instance_norm(x.root.expr, *exprs, *options), x.axes)


def prelu(em: Emitter, call: Any) -> Value | None:
    """prelu with one slope per channel."""
    from tvm import relax

    x, slope = em.value(call.args[0]), em.value(call.args[1])
    axis = None if x is None else _stored_axis(x, call.attrs.axis)
    if x is None or slope is None or axis is None:
        return None
    return em.result(relax.op.nn.prelu(x.root.expr, em.logical(slope), axis), x.axes)


def quantize(em: Emitter, call: Any) -> Value | None:
    """quantize and dequantize: the axis of a per-channel scale follows."""
    from tvm import relax

    x, scale, zero = (em.value(arg) for arg in call.args[:3])
    if x is None or scale is None or zero is None:
        return None
    per_channel = any(len(v.shape) and not is_one(v.shape[0]) for v in (scale, zero))
    axis = _stored_axis(x, call.attrs.axis) if per_channel else x.rank - 1
    if axis is None or x.rank == 0 or any(len(v.shape) > 1 for v in (scale, zero)):
        return None
    make = relax.op.quantize if call.op.name == "relax.quantize" else relax.op.dequantize
    made = make(x.root.expr, em.logical(scale), em.logical(zero), axis, str(call.attrs.out_dtype))
    return em.result(made, x.axes)


def matmul(em: Emitter, call: Any) -> Value | None:
    """x @ w with a matrix w: the rows of x may be stored in any order, as long as its columns come last."""
    from tvm import relax

    x, w = em.value(call.args[0]), em.value(call.args[1])
    if x is None or w is None or len(w.shape) != 2 or len(x.shape) < 3 or not covers(x.shape, x.axes):
        return None
    if x.axes == identity(len(x.shape)) or x.axes[-1] != x.rank - 1 or x.rank != len(x.shape):
        return None
    return em.result(relax.op.matmul(x.root.expr, em.logical(w), call.attrs.out_dtype or None), x.axes)


_ELEMENTWISE = """abs acos acosh asin asinh atan atanh bitwise_not ceil clip cos cosh erf exp floor isfinite isinf isnan
log logical_not negative round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc astype ewise_fma add subtract
multiply divide floor_divide mod floor_mod power atan2 log_add_exp maximum minimum equal greater greater_equal less
less_equal not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor left_shift right_shift where
nn.relu nn.relu6 nn.leakyrelu nn.gelu nn.gelu_tanh nn.selu nn.silu nn.softplus""".split()
_REDUCTIONS = "sum mean max min prod std variance argmax argmin".split()

RULES: dict[str, Rule] = {
    **{f"relax.{name}": elementwise for name in _ELEMENTWISE},
    **{f"relax.{name}": reduction for name in _REDUCTIONS},
    **{f"relax.nn.conv{n}d": conv for n in (1, 2, 3)},
    **{f"relax.nn.conv{n}d_transpose": conv_transpose for n in (1, 2)},
    **{f"relax.nn.{kind}_pool{n}d": pool for kind in ("max", "avg") for n in (1, 2, 3)},
    **{f"relax.nn.adaptive_avg_pool{n}d": adaptive_pool for n in (1, 2)},
    **{f"relax.{name}": reshape for name in ("reshape", "flatten", "squeeze", "expand_dims", "nn.batch_flatten")},
    **{f"relax.{name}": along_axis for name in ("nn.softmax", "nn.log_softmax", "cumsum", "cumprod")},
    **{f"relax.nn.{name}": layer_norm for name in ("layer_norm", "rms_norm")},
    **{f"relax.nn.{name}": channel_norm for name in ("instance_norm", "group_norm")},
    **{f"relax.{name}": quantize for name in ("quantize", "dequantize")},
    "relax.image.resize2d": resize,
    "relax.memory.view": agreement,
    "relax.permute_dims": permute,
    "relax.concat": concat,
    "relax.split": split,
    "relax.strided_slice": strided_slice,
    "relax.nn.pad": pad,
    "relax.nn.prelu": prelu,
    "relax.matmul": matmul,
}
