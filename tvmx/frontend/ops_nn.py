"""Convolution, pooling, normalisation and matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.relax import op as R

from tvmx.frontend import kernels
from tvmx.frontend.node import Expr, Node, constant, converter, dtype_of
from tvmx.frontend.ops_elementwise import is_float
from tvmx.frontend.ops_shape import cast, const_of, reshape

_LAYOUTS = {1: ("NCW", "OIW", "IOW"), 2: ("NCHW", "OIHW", "IOHW"), 3: ("NCDHW", "OIDHW", "IODHW")}


def same_pads(node: Node, sizes: list[Any], kernel: list[int], strides: list[int]) -> list[int]:
    """Begin and end pads of auto_pad SAME_*; `kernel` is the dilated extent."""
    upper = node.attr("auto_pad") == "SAME_UPPER"
    begin, end = [], []
    for size, k, s in zip(sizes, kernel, strides):
        if s == 1:
            total = k - 1
        elif isinstance(size, int):
            total = max((-(-size // s) - 1) * s + k - size, 0)
        elif (fixed := _same_for_any_size(k, s, upper)) is not None:
            begin.append(fixed[0])
            end.append(fixed[1])
            continue
        else:
            raise node.fail(
                f"auto_pad with stride {s} needs a fixed size instead of {size}; "
                "fix it with --shape or export with explicit pads"
            )
        begin.append(total // 2 if upper else total - total // 2)
        end.append(total - begin[-1])
    return begin + end


def _same_for_any_size(k: int, s: int, upper: bool) -> tuple[int, int] | None:
    """Begin and end pads that give auto_pad SAME's windows whatever the size, as (0, 1) does for 2 by 2; else None.

    The pads depend on the size modulo the stride. Too wide an end pad is harmless where it adds no window.
    """
    begins, ends = set(), set()
    sizes = range(1, 2 * s + k + 1)
    for size in sizes:
        total = max((-(-size // s) - 1) * s + k - size, 0)
        begins.add(total // 2 if upper else total - total // 2)
        ends.add(total - total // 2 if upper else total // 2)
    begin, end = max(begins), max(ends)
    if len(begins) > 1 or any((size + begin + end - k) // s + 1 != -(-size // s) for size in sizes):
        return None
    return begin, end


def pads_of(node: Node, sizes: list[Any], kernel: list[int], strides: list[int]) -> list[int]:
    auto = node.attr("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return same_pads(node, sizes, kernel, strides)
    if auto == "VALID":
        return [0] * (2 * len(kernel))
    if auto not in ("NOTSET", ""):
        raise node.fail(f"auto_pad {auto!r} is unknown")
    return list(node.attr("pads", [0] * (2 * len(kernel))))


def check_window(
    node: Node, sizes: list[Any], kernel: list[int], strides: list[int], dilations: list[int], pads: list[int]
) -> None:
    """Refuse a window that ONNX does not allow, or that is larger than the padded input."""
    n = len(kernel)
    for name, values in (("kernel_shape", kernel), ("strides", strides), ("dilations", dilations)):
        if len(values) != n:
            raise node.fail(f"{name} {values} has {len(values)} entries, not {n}")
        if min(values, default=1) < 1:
            raise node.fail(f"{name} {values} must be positive")
    if len(pads) != 2 * n:
        raise node.fail(f"pads {pads} has {len(pads)} entries, not {2 * n}")
    for size, k, d, begin, end in zip(sizes, kernel, dilations, pads, pads[n:]):
        extent = (k - 1) * d + 1
        if isinstance(size, int) and size and size + begin + end < extent:
            raise node.fail(f"a window of {extent} does not fit into {size} elements with pads {begin} and {end}")


def add_bias(node: Node, y: Expr, bias: Expr | None) -> Expr:
    if bias is None:
        return y
    rank = len(node.dims(y))
    return node.emit(R.add(y, reshape(node, bias, [1, *node.dims(bias), *[1] * (rank - 2)])))


@converter("Conv")
def conv(node: Node) -> Expr:
    x, w = node[0], node[1]
    dims, wdims = node.shape(0), node.int_shape(1)
    n = len(dims) - 2
    if n not in _LAYOUTS or len(wdims) != n + 2:
        raise node.fail(f"input of rank {len(dims)} and weight of rank {len(wdims)}; 3 to 5 work")
    kernel = wdims[2:]
    strides = list(node.attr("strides", [1] * n))
    dilations = list(node.attr("dilations", [1] * n))
    groups = int(node.attr("group", 1))
    if groups < 1:
        raise node.fail(f"group={groups} must be positive")
    declared = list(node.attr("kernel_shape", kernel))
    if declared != kernel:
        raise node.fail(f"kernel_shape {declared} is not that of the weight {wdims}")
    if isinstance(dims[1], int) and (dims[1] != wdims[1] * groups or wdims[0] % groups):
        raise node.fail(f"{dims[1]} input channels do not fit the weight {wdims} with group={groups}")
    check_window(node, [], kernel, strides, dilations, [0] * (2 * n))
    pads = pads_of(node, dims[2:], [(k - 1) * d + 1 for k, d in zip(kernel, dilations)], strides)
    check_window(node, dims[2:], kernel, strides, dilations, pads)
    bias = node.get(2)
    if bias is not None and node.dims(bias) != [wdims[0]]:
        raise node.fail(f"a bias of shape {node.dims(bias)} does not fit {wdims[0]} output channels")
    if min(pads) < 0:
        x, pads = _crop(node, x, pads), [max(p, 0) for p in pads]
    fn = {1: R.nn.conv1d, 2: R.nn.conv2d, 3: R.nn.conv3d}[n]
    data_layout, kernel_layout, _ = _LAYOUTS[n]
    y = node.emit(
        fn(
            x,
            w,
            strides=strides,
            padding=pads,
            dilation=dilations,
            groups=groups,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
        )
    )
    return add_bias(node, y, node.get(2))


def _crop(node: Node, x: Expr, pads: list[int]) -> Expr:
    """Negative pads cut the input."""
    dims = node.dims(x)
    n = len(pads) // 2
    axes = list(range(2, 2 + n))
    begin = [max(-p, 0) for p in pads[:n]]
    end = [d - max(-p, 0) for d, p in zip(dims[2:], pads[n:])]
    return node.emit(R.strided_slice(x, axes, begin, end, [1] * n))


@converter("ConvTranspose")
def conv_transpose(node: Node) -> Expr:
    x, w = node[0], node[1]
    dims, wdims = node.shape(0), node.int_shape(1)
    n = len(dims) - 2
    if n not in _LAYOUTS or len(wdims) != n + 2:
        raise node.fail(f"input of rank {len(dims)} and weight of rank {len(wdims)}; 3 to 5 work")
    kernel = wdims[2:]
    strides = list(node.attr("strides", [1] * n))
    dilations = list(node.attr("dilations", [1] * n))
    extra = list(node.attr("output_padding", [0] * n))
    groups = int(node.attr("group", 1))
    extent = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    auto, wanted = node.attr("auto_pad", "NOTSET"), node.attr("output_shape")
    if wanted is not None or auto in ("SAME_UPPER", "SAME_LOWER"):
        sizes = node.int_shape(0)[2:]
        wanted = list(wanted)[-n:] if wanted is not None else [d * s for d, s in zip(sizes, strides)]
        total = [s * (d - 1) + o + k - t for s, d, o, k, t in zip(strides, sizes, extra, extent, wanted)]
        # What is missing from the full result is padding at the end.
        extra = [o + max(-t, 0) for o, t in zip(extra, total)]
        total = [max(t, 0) for t in total]
        begin = [t // 2 if auto == "SAME_UPPER" else t - t // 2 for t in total]
        pads = begin + [t - b for t, b in zip(total, begin)]
    elif auto == "VALID":
        pads = [0] * (2 * n)
    else:
        pads = list(node.attr("pads", [0] * (2 * n)))
    simple = (
        n <= 2
        and groups == 1
        and max(dilations) == 1
        and min(pads) >= 0
        and all(o < s for o, s in zip(extra, strides))
        and all(p <= k - 1 for p, k in zip(pads, kernel * 2))
    )
    if simple:
        fn = {1: R.nn.conv1d_transpose, 2: R.nn.conv2d_transpose}[n]
        data_layout, _, kernel_layout = _LAYOUTS[n]
        y = node.emit(
            fn(
                x,
                w,
                strides=strides,
                padding=pads,
                output_padding=extra,
                dilation=dilations,
                groups=groups,
                data_layout=data_layout,
                kernel_layout=kernel_layout,
            )
        )
    else:
        y = node.te(_conv_transpose_te(n, strides, dilations, groups, pads, extra, extent), x, w)
    return add_bias(node, y, node.get(2))


def _conv_transpose_te(n: int, strides: Any, dilations: Any, groups: int, pads: Any, extra: Any, extent: Any) -> Any:
    """Gather form for any rank, group and dilation: each output element sums the taps that hit it."""

    def kernel(x: Any, w: Any) -> Any:
        per_group_in, per_group_out = x.shape[1] // groups, w.shape[1]
        spatial = [(x.shape[2 + i] - 1) * strides[i] + extent[i] + extra[i] - pads[i] - pads[n + i] for i in range(n)]
        rc = te.reduce_axis((0, per_group_in), "rc")
        taps = [te.reduce_axis((0, w.shape[2 + i]), f"k{i}") for i in range(n)]

        def at(b: Any, c: Any, *pos: Any) -> Any:
            at_ = [p + pads[i] - taps[i] * dilations[i] for i, p in enumerate(pos)]
            index = [tirx.indexdiv(a, s) for a, s in zip(at_, strides)]
            hit = [
                tirx.all(a >= 0, tirx.indexmod(a, s) == 0, q < x.shape[2 + i])
                for i, (a, s, q) in enumerate(zip(at_, strides, index))
            ]
            ci = tirx.indexdiv(c, per_group_out) * per_group_in + rc
            value = x(b, ci, *index) * w(ci, tirx.indexmod(c, per_group_out), *taps)
            return te.sum(tirx.if_then_else(tirx.all(*hit), value, tirx.const(0, x.dtype)), axis=[rc, *taps])

        return te.compute((x.shape[0], per_group_out * groups, *spatial), at, name="conv_transpose")

    return kernel


# matrix products


@converter("MatMul")
def matmul(node: Node) -> Expr:
    return product_of(node, node[0], node[1])


def product_of(node: Node, a: Expr, b: Expr) -> Expr:
    """Matrix product; 16-bit floats are summed in float32, as every peer does."""
    dtype = dtype_of(a)
    if dtype in ("float16", "bfloat16"):
        return cast(node, node.emit(R.matmul(a, b, out_dtype="float32")), dtype)
    return node.emit(R.matmul(a, b))


@converter("Gemm")
def gemm(node: Node) -> Expr:
    a, b = node[0], node[1]
    alpha, beta = float(node.attr("alpha", 1.0)), float(node.attr("beta", 1.0))
    dtype = dtype_of(a)
    if node.attr("transA", 0):
        a = _transposed(node, a)
    if node.attr("transB", 0):
        b = _transposed(node, b)
    y = product_of(node, a, b)
    if alpha != 1.0:
        y = node.emit(R.multiply(y, node.const(alpha, dtype)))
    if not node.has(2) or beta == 0.0:
        return y
    c = node[2]
    if beta != 1.0:
        array = const_of(c)
        c = (
            constant((array * beta).astype(array.dtype))
            if array is not None
            else node.emit(R.multiply(c, node.const(beta, dtype)))
        )
    return node.emit(R.add(y, c))


def _transposed(node: Node, x: Expr) -> Expr:
    array = const_of(x)
    if array is not None:
        return constant(np.ascontiguousarray(array.T))
    return node.emit(R.permute_dims(x))


@converter("MatMulInteger")
def matmul_integer(node: Node) -> Expr:
    """int32 product of (A - zero point) and (B - zero point), exact."""
    a, b = cast(node, node[0], "int32"), cast(node, node[1], "int32")
    if node.has(2):
        zero = cast(node, node[2], "int32")
        zdims = node.dims(zero)
        if len(zdims) == 1 and zdims[0] != 1:  # one per row
            zero = reshape(node, zero, [*zdims, 1])
        a = node.emit(R.subtract(a, zero))
    if node.has(3):
        b = node.emit(R.subtract(b, cast(node, node[3], "int32")))
    return node.emit(R.matmul(a, b))


# pooling


@converter("GlobalAveragePool", "GlobalMaxPool")
def global_pool(node: Node) -> Expr:
    axes = list(range(2, node.rank(0)))
    fn = R.mean if node.op == "GlobalAveragePool" else R.max
    return node.emit(fn(node[0], axes, keepdims=True))


@converter("GlobalLpPool")
def global_lp_pool(node: Node) -> Expr:
    x, p = node[0], float(node.attr("p", 2))
    powered = node.emit(R.power(node.emit(R.abs(x)), node.const(p, dtype_of(x))))
    total = node.emit(R.sum(powered, list(range(2, node.rank(0))), keepdims=True))
    return node.emit(R.power(total, node.const(1 / p, dtype_of(x))))


class _Window:
    """Geometry of a pooling node: output sizes by the rules of ONNX, ceil_mode included."""

    def __init__(self, node: Node) -> None:
        dims = node.shape(0)
        self.n = len(dims) - 2
        self.kernel = list(node.attr("kernel_shape", []))
        if len(self.kernel) != self.n:
            raise node.fail(f"kernel_shape {self.kernel} does not fit an input of rank {len(dims)}")
        self.strides = list(node.attr("strides", [1] * self.n))
        self.dilations = list(node.attr("dilations", [1] * self.n))
        check_window(node, [], self.kernel, self.strides, self.dilations, [0] * (2 * self.n))
        self.extent = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations)]
        self.pads = pads_of(node, dims[2:], self.extent, self.strides)
        check_window(node, dims[2:], self.kernel, self.strides, self.dilations, self.pads)
        if any(p < 0 or p >= e for p, e in zip(self.pads, self.extent * 2)):
            raise node.fail(f"pads {self.pads} must lie in [0, window) of a window of {self.extent}")
        self.ceil = bool(node.attr("ceil_mode", 0))
        self.out: list[Any] = []
        self.extra: list[int] = []  # beyond the pads, where ceil_mode lets the last window reach
        for i in range(self.n):
            size, s = dims[2 + i], self.strides[i]
            room = size + self.pads[i] + self.pads[self.n + i] - self.extent[i]
            if not self.ceil:
                self.out.append(room // s + 1)
                self.extra.append(0)
                continue
            if not isinstance(room, int):
                raise node.fail("ceil_mode needs fixed sizes; fix them with --shape")
            count = -(-room // s) + 1
            if (count - 1) * s >= size + self.pads[i]:  # a window that starts in the end padding
                count -= 1
            self.out.append(count)
            self.extra.append(max((count - 1) * s - room, 0))


@converter("MaxPool")
def max_pool(node: Node) -> Any:
    x = node[0]
    win = _Window(node)
    if not node.wants(1) and win.n <= 3 and not any(p < 0 for p in win.pads):
        fn = {1: R.nn.max_pool1d, 2: R.nn.max_pool2d, 3: R.nn.max_pool3d}[win.n]
        ends = [p + e for p, e in zip(win.pads[win.n :], win.extra)]
        layout = _LAYOUTS[win.n][0]
        return node.emit(fn(x, win.kernel, win.strides, win.pads[: win.n] + ends, win.dilations, False, layout=layout))
    column_major = bool(node.attr("storage_order", 0))
    result = node.te(_max_pool_te(win, column_major, node.wants(1)), x)
    if not node.wants(1):
        return result
    return [node.emit(relax.TupleGetItem(result, i)) for i in range(2)]


def _max_pool_te(win: _Window, column_major: bool, indices: bool) -> Any:
    def kernel(x: Any) -> Any:
        taps = [te.reduce_axis((0, k), f"k{i}") for i, k in enumerate(win.kernel)]
        again = [te.reduce_axis((0, k), f"j{i}") for i, k in enumerate(win.kernel)]
        lowest = kernels.lowest(x.dtype)

        def place(pos: Any, taps: Any) -> tuple[list[Any], Any]:
            at = [p * s + t * d - b for p, s, t, d, b in zip(pos, win.strides, taps, win.dilations, win.pads)]
            inside = tirx.all(*(tirx.all(a >= 0, a < x.shape[2 + i]) for i, a in enumerate(at)))
            return at, inside

        def best(b: Any, c: Any, *pos: Any) -> Any:
            at, inside = place(pos, taps)
            return kernels.maximum(tirx.if_then_else(inside, x(b, c, *at), lowest), axis=taps)

        out = (x.shape[0], x.shape[1], *win.out)
        y = te.compute(out, best, name="max_pool")
        if not indices:
            return y

        def where(b: Any, c: Any, *pos: Any) -> Any:
            at, inside = place(pos, again)
            order = list(range(win.n))
            if column_major:
                order = order[::-1]
            flat: Any = b * x.shape[1] + c
            for k in order:
                flat = flat * x.shape[2 + k] + at[k]
            hit = tirx.if_then_else(inside, x(b, c, *at) == y(b, c, *pos), False)
            none = tirx.const(2**62, "int64")
            return te.min(tirx.Select(hit, flat.astype("int64"), none), axis=again)

        return [y, te.compute(out, where, name="max_pool_index")]

    return kernel


@converter("AveragePool")
def average_pool(node: Node) -> Expr:
    x = node[0]
    win = _Window(node)
    count_pads = bool(node.attr("count_include_pad", 0))
    if win.n <= 3 and not any(win.extra) and min(win.pads) >= 0 and is_float(dtype_of(x)):
        fn = {1: R.nn.avg_pool1d, 2: R.nn.avg_pool2d, 3: R.nn.avg_pool3d}[win.n]
        layout = _LAYOUTS[win.n][0]
        return node.emit(fn(x, win.kernel, win.strides, win.pads, win.dilations, False, count_pads, layout=layout))
    return node.te(_sum_pool_te(win, "average", count_pads), x)


@converter("LpPool")
def lp_pool(node: Node) -> Expr:
    return node.te(_sum_pool_te(_Window(node), float(node.attr("p", 2))), node[0])


def _sum_pool_te(win: _Window, what: str | float, count_pads: bool = False) -> Any:
    """Average (divisor counts the pads, but never what ceil_mode adds beyond them) or Lp norm."""

    def kernel(x: Any) -> Any:
        dtype = x.dtype
        taps = [te.reduce_axis((0, k), f"k{i}") for i, k in enumerate(win.kernel)]
        again = [te.reduce_axis((0, k), f"j{i}") for i, k in enumerate(win.kernel)]

        def place(pos: Any, taps: Any) -> list[Any]:
            return [p * s + t * d - b for p, s, t, d, b in zip(pos, win.strides, taps, win.dilations, win.pads)]

        def inside(at: Any) -> Any:
            return tirx.all(*(tirx.all(a >= 0, a < x.shape[2 + i]) for i, a in enumerate(at)))

        def total(b: Any, c: Any, *pos: Any) -> Any:
            at = place(pos, taps)
            value = x(b, c, *at)
            if what != "average":
                value = tirx.power(tirx.abs(value), tirx.const(what, dtype))
            return te.sum(tirx.if_then_else(inside(at), value, tirx.const(0, dtype)), axis=taps)

        out = (x.shape[0], x.shape[1], *win.out)
        sums = te.compute(out, total, name="pool_sum")
        if what != "average":
            root = tirx.const(1.0 / float(what), dtype)
            return te.compute(out, lambda *i: tirx.power(sums(*i), root), name="lp_pool")

        def counted(*idx: Any) -> Any:
            at = place(idx[2:], again)
            if count_pads:
                ok = tirx.all(*(a < x.shape[2 + i] + win.pads[win.n + i] for i, a in enumerate(at)))
            else:
                ok = inside(at)
            return te.sum(tirx.Select(ok, tirx.const(1, dtype), tirx.const(0, dtype)), axis=again)

        count = te.compute(out, counted, name="pool_count")
        return te.compute(
            out,
            lambda *i: sums(*i) / tirx.max(count(*i), tirx.const(1, dtype)),
            name="average_pool",
        )

    return kernel


# normalisation


@converter("BatchNormalization")
def batch_norm(node: Node) -> Expr:
    if node.attr("training_mode", 0):
        raise node.fail("training_mode=1; tvmx compiles for inference: export in eval mode")
    x = node[0]
    dims = node.shape(0)
    eps = float(node.attr("epsilon", 1e-5))
    arrays = [const_of(node[i]) for i in range(1, 5)]
    wide = [1, -1, *[1] * (len(dims) - 2)]
    dtype = dtype_of(x)
    if all(a is not None for a in arrays):
        scale, bias, mean, var = (np.asarray(a, np.float64) for a in arrays)
        k = scale / np.sqrt(var + eps)
        shift = bias - mean * k
        y = node.emit(R.multiply(x, node.const(k.reshape(wide), dtype)))
        return node.emit(R.add(y, node.const(shift.reshape(wide), dtype)))
    shape = [1, dims[1], *[1] * (len(dims) - 2)]
    scale_, bias_, mean_, var_ = (reshape(node, node[i], shape) for i in range(1, 5))
    root = node.emit(R.sqrt(node.emit(R.add(var_, node.const(eps, dtype_of(var_))))))
    y = node.emit(R.divide(node.emit(R.subtract(x, mean_)), root))
    return node.emit(R.add(node.emit(R.multiply(y, scale_)), bias_))


@converter("InstanceNormalization")
def instance_norm(node: Node) -> Expr:
    rank = node.rank(0)
    return node.emit(
        R.nn.instance_norm(
            node[0], node[1], node[2], channel_axis=1, axes=list(range(2, rank)),
            epsilon=float(node.attr("epsilon", 1e-5)),
        )
    )  # fmt: skip


@converter("LayerNormalization")
def layer_norm(node: Node) -> Any:
    x = node[0]
    dims = node.shape(0)
    axis = node.axis(node.attr("axis", -1), len(dims))
    axes = list(range(axis, len(dims)))
    eps = float(node.attr("epsilon", 1e-5))
    dtype = dtype_of(x)
    scale = node[1]
    bias = node.get(2)
    plain = node.dims(scale) == dims[axis:] and (bias is None or node.dims(bias) == dims[axis:])
    if plain and not node.wants(1) and not node.wants(2) and dtype == "float32":
        if bias is None:
            bias = node.const(np.zeros(node.int_shape(1)), dtype)
        return node.emit(R.nn.layer_norm(x, scale, bias, axes, eps))
    wide = cast(node, x, "float32") if dtype in ("float16", "bfloat16") else x
    mean = node.emit(R.mean(wide, axes, keepdims=True))
    centred = node.emit(R.subtract(wide, mean))
    var = node.emit(R.mean(node.emit(R.multiply(centred, centred)), axes, keepdims=True))
    inv = node.emit(R.rsqrt(node.emit(R.add(var, node.const(eps, dtype_of(wide))))))
    y = cast(node, node.emit(R.multiply(centred, inv)), dtype)
    y = node.emit(R.multiply(y, scale))
    if bias is not None:
        y = node.emit(R.add(y, bias))
    return [y, mean, inv]


@converter("RMSNormalization")
def rms_norm(node: Node) -> Expr:
    x = node[0]
    dims = node.shape(0)
    axis = node.axis(node.attr("axis", -1), len(dims))
    axes = list(range(axis, len(dims)))
    eps = float(node.attr("epsilon", 1e-5))
    dtype = dtype_of(x)
    scale = node[1]
    if axis > 0 and dtype == "float32" and node.dims(scale) == dims[axis:]:
        return node.emit(R.nn.rms_norm(x, scale, axes, eps))
    wide = cast(node, x, "float32") if dtype in ("float16", "bfloat16") else x
    square = node.emit(R.mean(node.emit(R.multiply(wide, wide)), axes, keepdims=True))
    inv = node.emit(R.rsqrt(node.emit(R.add(square, node.const(eps, dtype_of(wide))))))
    y = cast(node, node.emit(R.multiply(wide, inv)), dtype_of(scale))
    return node.emit(R.multiply(y, scale))


@converter("LpNormalization")
def lp_normalization(node: Node) -> Expr:
    x = node[0]
    axis, p = node.axis(node.attr("axis", -1), node.rank(0)), int(node.attr("p", 2))
    if p == 1:
        norm = node.emit(R.sum(node.emit(R.abs(x)), [axis], keepdims=True))
    else:
        norm = node.emit(R.sqrt(node.emit(R.sum(node.emit(R.multiply(x, x)), [axis], keepdims=True))))
    zero = node.const(0, dtype_of(x))
    # A row of zeros stays zero.
    safe = node.emit(R.where(node.emit(R.equal(norm, zero)), node.const(1, dtype_of(x)), norm))
    return node.emit(R.divide(x, safe))


@converter("Det")
def det(node: Node) -> Expr:
    """Gaussian elimination with row pivoting, one matrix after the other."""
    from tvm.script.ir_builder import tirx as T

    dims = node.int_shape(0)
    n = dims[-1]

    def kernel(x: Any) -> Any:
        def body(data: Any, out: Any) -> None:
            with T.serial(0, kernels.size_of(dims[:-2])) as b:
                a = T.buffer_proxy(T.alloc_buffer([n * n], x.dtype, scope="local"))
                state = T.buffer_proxy(T.alloc_buffer([2], x.dtype, scope="local"))
                pivot = T.buffer_proxy(T.alloc_buffer([1], "int32", scope="local"))
                with T.serial(0, n * n) as i:
                    a[i] = data[b * (n * n) + i]
                state[0] = tirx.const(1, x.dtype)
                for k in range(n):
                    pivot[0] = k
                    with T.serial(k, n) as r:
                        with T.If(tirx.abs(a[r * n + k]) > tirx.abs(a[pivot[0] * n + k])):
                            with T.Then():
                                pivot[0] = r
                    with T.If(pivot[0] != k):
                        with T.Then():
                            state[0] = tirx.const(0, x.dtype) - state[0]
                            with T.serial(0, n) as c:
                                state[1] = a[k * n + c]
                                a[k * n + c] = a[pivot[0] * n + c]
                                a[pivot[0] * n + c] = state[1]
                    state[0] = state[0] * a[k * n + k]
                    with T.If(a[k * n + k] != tirx.const(0, x.dtype)):
                        with T.Then():
                            with T.serial(k + 1, n) as r:
                                state[1] = a[r * n + k] / a[k * n + k]
                                with T.serial(0, n) as c:
                                    a[r * n + c] = a[r * n + c] - state[1] * a[k * n + c]
                out[b] = state[0]

        return kernels.extern([dims[:-2] or [1]], [x.dtype], [x], body, "det")

    return reshape(node, node.te(kernel, node[0]), dims[:-2])


@converter("GroupNormalization")
def group_norm(node: Node) -> Expr:
    x = node[0]
    dims = node.shape(0)
    groups = int(node.attrs["num_groups"])
    channels = dims[1]
    if not isinstance(channels, int) or channels % groups:
        raise node.fail(f"{channels} channels do not split into {groups} groups")
    gamma, beta = node[1], node[2]
    if node.opset < 21:  # one value per group then, one per channel since
        spread = [groups, channels // groups]
        gamma, beta = (
            reshape(node, node.emit(R.broadcast_to(reshape(node, v, [groups, 1]), spread)), [channels])
            for v in (gamma, beta)
        )
    return node.emit(
        R.nn.group_norm(
            x, gamma, beta, num_groups=groups, channel_axis=1, axes=list(range(2, len(dims))),
            epsilon=float(node.attr("epsilon", 1e-5)),
        )
    )  # fmt: skip


@converter("LRN")
def lrn(node: Node) -> Expr:
    size = int(node.attrs["size"])
    alpha, beta = float(node.attr("alpha", 1e-4)), float(node.attr("beta", 0.75))
    bias = float(node.attr("bias", 1.0))
    before = (size - 1) // 2

    def kernel(x: Any) -> Any:
        dtype = x.dtype
        k = te.reduce_axis((0, size), "k")

        def square(b: Any, c: Any, *rest: Any) -> Any:
            at = c + k - before
            ok = tirx.all(at >= 0, at < x.shape[1])
            value = x(b, at, *rest)
            return te.sum(tirx.if_then_else(ok, value * value, tirx.const(0, dtype)), axis=k)

        sums = te.compute(x.shape, square, name="lrn_sum")
        return te.compute(
            x.shape,
            lambda *i: (
                x(*i)
                / tirx.power(
                    tirx.const(bias, dtype) + tirx.const(alpha / size, dtype) * sums(*i),
                    tirx.const(beta, dtype),
                )
            ),
            name="lrn",
        )

    return node.te(kernel, node[0])


@converter("Softmax", "LogSoftmax", "Hardmax")
def softmax(node: Node) -> Expr:
    x = node[0]
    dims = node.shape(0)
    default = 1 if node.opset < 13 else -1
    axis = node.axis(node.attr("axis", default), len(dims))
    if node.opset < 13 and axis != len(dims) - 1:
        # Before opset 13 everything from `axis` on is one row.
        from tvmx.frontend.ops_shape import product

        flat = reshape(node, x, [product(dims[:axis]), product(dims[axis:])])
        return reshape(node, _softmax(node, flat, 1), dims)
    return _softmax(node, x, axis)


def _softmax(node: Node, x: Expr, axis: int) -> Expr:
    dtype = dtype_of(x)
    if dtype in ("float16", "bfloat16") and node.op != "Hardmax":
        return cast(node, _softmax(node, cast(node, x, "float32"), axis), dtype)
    if node.op == "Softmax":
        return node.emit(R.nn.softmax(x, axis))
    if node.op == "LogSoftmax":
        return node.emit(R.nn.log_softmax(x, axis))

    def kernel(t: Any) -> Any:
        # One where the first maximum is, zero elsewhere.
        size = t.shape[axis]
        rest = [d for i, d in enumerate(t.shape) if i != axis]
        k, j = te.reduce_axis((0, size), "k"), te.reduce_axis((0, size), "j")

        def put(idx: Any, v: Any) -> list[Any]:
            idx = list(idx)
            return [*idx[:axis], v, *idx[axis:]]

        top = te.compute(rest, lambda *i: kernels.maximum(t(*put(i, k)), axis=k), name="hardmax_max")
        first = te.compute(
            rest,
            lambda *i: te.min(tirx.Select(t(*put(i, j)) == top(*i), j, size).astype("int64"), axis=j),
            name="hardmax_first",
        )

        def at(*i: Any) -> Any:
            others = [v for q, v in enumerate(i) if q != axis]
            return tirx.Select(i[axis].astype("int64") == first(*others), 1, 0).astype(t.dtype)

        return te.compute(t.shape, at, name="hardmax")

    if len(node.dims(x)) == 1:
        dims, axis = node.dims(x), 1
        return reshape(node, node.te(kernel, reshape(node, x, [1, *dims])), dims)
    return node.te(kernel, x)
