"""Gather, scatter, selection and padding: operators whose indices may come from user data.

Indices are wrapped (negative from the end) and clamped inside the kernels. Where an index tensor is
a model input, an IndexCheck tells the executor which values to refuse with an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper
from tvm import relax, te, tirx
from tvm.relax import op as R

from tvmx.frontend import kernels
from tvmx.frontend.model import IndexCheck
from tvmx.frontend.node import Expr, Node, constant, converter, dtype_of
from tvmx.frontend.ops_shape import as_exprs, const_of, product, reshape


def guard_indices(node: Node, i: int, size: Any) -> None:
    """Check constant indices now, and record the check of those that are a model input."""
    if not isinstance(size, int):
        return
    array = node.static(i)
    if array is not None and array.dtype != object:
        if array.size and (array.min() < -size or array.max() >= size):
            raise node.fail(
                f"index {int(array.max() if array.max() >= size else array.min())} is outside [-{size}, {size - 1}]"
            )
        return
    origin = node.importer.origin(node.proto.input[i])
    if origin is not None:
        node.importer.checks.append(IndexCheck(origin, -size, size - 1, node.label))


@converter("Gather")
def gather(node: Node) -> Expr:
    x = node[0]
    dims, idims = node.shape(0), node.shape(1)
    axis = node.axis(node.attr("axis", 0), len(dims))
    size = dims[axis]
    guard_indices(node, 1, size)
    array = node.static(1)
    if array is not None and array.dtype != object and isinstance(size, int):
        data = const_of(x)
        index = np.where(array < 0, array + size, array).astype(np.int64)
        if data is not None and index.size * data.size // max(size, 1) <= 1 << 20:
            return constant(np.ascontiguousarray(np.take(data, index, axis)))
        flat = index.reshape(-1)
        if flat.size and np.array_equal(flat, flat[0] + np.arange(flat.size)):
            # A run of indices is a slice: a view where it is outermost.
            start = int(flat[0])
            part = node.emit(R.strided_slice(x, [axis], [start], [start + flat.size], [1]))
            return reshape(node, part, [*dims[:axis], *index.shape, *dims[axis + 1 :]])

    def kernel(t: Any, ind: Any) -> Any:
        def at(*i: Any) -> Any:
            here = i[axis : axis + len(idims)]
            k = kernels.wrap(ind(*here), t.shape[axis])
            return t(*i[:axis], k, *i[axis + len(idims) :])

        return te.compute((*t.shape[:axis], *ind.shape, *t.shape[axis + 1 :]), at, name="gather")

    if size == 0 or any(isinstance(d, int) and d == 0 for d in idims):
        return node.const(np.zeros([*dims[:axis], *idims, *dims[axis + 1 :]]), dtype_of(x))
    return node.te(kernel, x, node[1])


@converter("GatherElements")
def gather_elements(node: Node) -> Expr:
    dims = node.shape(0)
    axis = node.axis(node.attr("axis", 0), len(dims))
    guard_indices(node, 1, dims[axis])

    def kernel(t: Any, ind: Any) -> Any:
        def at(*i: Any) -> Any:
            k = kernels.wrap(ind(*i), t.shape[axis])
            return t(*i[:axis], k, *i[axis + 1 :])

        return te.compute(ind.shape, at, name="gather_elements")

    return node.te(kernel, node[0], node[1])


@converter("GatherND")
def gather_nd(node: Node) -> Expr:
    dims, idims = node.shape(0), node.shape(1)
    batch = int(node.attr("batch_dims", 0))
    depth = idims[-1]
    if not isinstance(depth, int) or depth + batch > len(dims):
        raise node.fail(f"indices of shape {idims} do not index an input of rank {len(dims)}")
    _guard_tuples(node, 1, dims[batch : batch + depth])

    def kernel(t: Any, ind: Any) -> Any:
        lead = len(idims) - 1

        def at(*i: Any) -> Any:
            where = [kernels.wrap(ind(*i[:lead], k), t.shape[batch + k]) for k in range(depth)]
            return t(*i[:batch], *where, *i[lead:])

        return te.compute((*ind.shape[:-1], *t.shape[batch + depth :]), at, name="gather_nd")

    return node.te(kernel, node[0], node[1])


def _guard_tuples(node: Node, i: int, sizes: list[Any]) -> None:
    """As guard_indices for index tuples; only equal sizes can be checked on a whole input."""
    array = node.static(i)
    if array is not None and array.dtype != object:
        for k, size in enumerate(sizes):
            part = array[..., k]
            if isinstance(size, int) and part.size and (part.min() < -size or part.max() >= size):
                raise node.fail(f"an index of dim {k} is outside [-{size}, {size - 1}]")
        return
    known = [s for s in sizes if isinstance(s, int)]
    if len(known) == len(sizes) and known:
        # The widest bound: a value outside of it is wrong in whichever place it stands.
        guard_indices(node, i, max(known))


@converter("Scatter", "ScatterElements")
def scatter_elements(node: Node) -> Expr:
    dims = node.shape(0)
    axis = node.axis(node.attr("axis", 0), len(dims))
    reduction = node.attr("reduction", "none")
    if reduction not in kernels.REDUCTIONS:
        raise node.fail(f"reduction {reduction!r} is unknown")
    guard_indices(node, 1, dims[axis])
    return node.te(kernels.scatter_elements(axis, reduction), node[0], node[1], node[2])


@converter("ScatterND")
def scatter_nd(node: Node) -> Expr:
    dims, depth = node.shape(0), node.shape(1)[-1]
    reduction = node.attr("reduction", "none")
    if not isinstance(depth, int) or depth > len(dims):
        raise node.fail(f"indices of shape {node.shape(1)} do not index rank {len(dims)}")
    if reduction not in kernels.REDUCTIONS:
        raise node.fail(f"reduction {reduction!r} is unknown")
    _guard_tuples(node, 1, dims[:depth])
    return node.te(kernels.scatter_nd(depth, reduction), node[0], node[1], node[2])


@converter("TensorScatter")
def tensor_scatter(node: Node) -> Expr:
    """Writes `update` into `past_cache` along `axis`, from a start per batch (0 when left out)."""
    dims, udims = node.shape(0), node.shape(1)
    axis = node.axis(node.attr("axis", -2), len(dims))
    circular = node.attr("mode", "linear") == "circular"
    starts = node.get(2)
    if starts is None:
        starts = node.const(np.zeros([dims[0]]), "int64")
    elif not circular and isinstance(dims[axis], int):
        guard_indices(node, 2, dims[axis])

    def kernel(past: Any, update: Any, start: Any) -> Any:
        length, size = update.shape[axis], past.shape[axis]

        def at(*i: Any) -> Any:
            first = start(i[0]).astype("int64")
            offset = i[axis] - first
            if circular:
                offset = tirx.floormod(offset, size)
            inside = tirx.all(offset >= 0, offset < length)
            place = tirx.max(tirx.min(offset, length - 1), tirx.const(0, "int64"))
            new = update(*i[:axis], place, *i[axis + 1 :])
            return tirx.Select(inside, new, past(*i))

        return te.compute(past.shape, at, name="tensor_scatter")

    del udims
    return node.te(kernel, node[0], node[1], starts)


@converter("OneHot")
def one_hot(node: Node) -> Expr:
    depth = node.known_ints(1, "depth")[0]
    rank = node.rank(0)
    axis = node.axis(node.attr("axis", -1), rank + 1)

    def kernel(ind: Any, values: Any) -> Any:
        def at(*i: Any) -> Any:
            k = ind(*i[:axis], *i[axis + 1 :])
            k = k if str(k.ty.dtype).startswith("int") else k.astype("int64")
            k = k.astype("int64")
            # Outside of [-depth, depth - 1] the whole row stays off, as the operator says.
            k = tirx.Select(k < 0, k + depth, k)
            return tirx.Select(k == i[axis], values(1), values(0))

        out = list(ind.shape)
        out.insert(axis, depth)
        return te.compute(out, at, name="one_hot")

    return node.te(kernel, node[0], node[2])


@converter("TopK")
def top_k(node: Node) -> list[Expr]:
    x = node[0]
    dims = node.shape(0)
    k = int(node.attrs["k"]) if node.opset < 10 else node.known_ints(1, "k")[0]
    axis = node.axis(node.attr("axis", -1), len(dims))
    largest = bool(node.attr("largest", 1))
    size = dims[axis]
    if isinstance(size, int) and k > size:
        raise node.fail(f"k={k} is more than the {size} elements of axis {axis}")
    if k == 0:
        out = [0 if i == axis else d for i, d in enumerate(dims)]
        return [node.const(np.zeros(out), dtype_of(x)), node.const(np.zeros(out), "int64")]
    if not isinstance(size, int) or k <= size // 2 or k <= 32:
        pair = node.te(kernels.top_k(k, axis, largest), x)
        return [node.emit(relax.TupleGetItem(pair, i)) for i in range(2)]
    order = sorted_order(node, x, axis, largest)
    order = node.emit(R.strided_slice(order, [axis], [0], [k], [1]))
    return [take_along(node, x, order, axis), order]


def sorted_order(node: Node, x: Expr, axis: int, descending: bool) -> Expr:
    """int64 indices that sort x along the axis, stable."""
    pair = node.te(kernels.sort_rows(axis, descending), x, name="sort")
    return node.emit(relax.TupleGetItem(pair, 0))


def take_along(node: Node, x: Expr, order: Expr, axis: int) -> Expr:
    def kernel(t: Any, ind: Any) -> Any:
        return te.compute(ind.shape, lambda *i: t(*i[:axis], ind(*i), *i[axis + 1 :]), name="take_along")

    return node.te(kernel, x, order, name="take_along")


@converter("ArgMax", "ArgMin")
def arg_reduce(node: Node) -> Expr:
    dims = node.shape(0)
    axis = node.axis(node.attr("axis", 0), len(dims))
    keep, last = bool(node.attr("keepdims", 1)), bool(node.attr("select_last_index", 0))
    largest = node.op == "ArgMax"

    def kernel(t: Any) -> Any:
        size = t.shape[axis]
        k, j = te.reduce_axis((0, size), "k"), te.reduce_axis((0, size), "j")
        rest = [d for i, d in enumerate(t.shape) if i != axis]

        def put(i: Any, v: Any) -> list[Any]:
            return [*i[:axis], v, *i[axis:]]

        best = te.compute(
            rest or (1,),
            lambda *i: (kernels.maximum if largest else kernels.minimum)(t(*put(i if rest else (), k)), axis=k),
            name="arg_best",
        )

        def first(*i: Any) -> Any:
            hit = t(*put(i if rest else (), j)) == best(*(i if rest else (0,)))
            if last:
                return te.max(tirx.Select(hit, j.astype("int64"), tirx.const(-1, "int64")), axis=j)
            return te.min(tirx.Select(hit, j, size).astype("int64"), axis=j)

        found = te.compute(rest or (1,), first, name="arg_first")
        # NaN equals nothing; the clamp keeps the result an index.
        last_index = tirx.Cast("int64", size - 1)
        return te.compute(
            rest or (1,),
            lambda *i: tirx.max(tirx.min(found(*i), last_index), tirx.const(0, "int64")),
            name="arg_index",
        )

    y = node.te(kernel, node[0])
    out = [1 if i == axis else d for i, d in enumerate(dims)]
    return reshape(node, y, out if keep else [d for i, d in enumerate(dims) if i != axis])


@converter("CumSum", "CumProd")
def cumulative(node: Node) -> Expr:
    axis = node.axis(node.known_ints(1, "the axis")[0], node.rank(0))
    if product(node.shape(0)) == 0:
        return node[0]
    return node.te(
        kernels.scan(
            axis,
            bool(node.attr("exclusive", 0)),
            bool(node.attr("reverse", 0)),
            node.op == "CumProd",
        ),
        node[0],
    )


@converter("Trilu")
def trilu(node: Node) -> Expr:
    upper = bool(node.attr("upper", 1))
    k = node.known_ints(1, "k")[0] if node.has(1) else 0
    if product(node.shape(0)) == 0:
        return node[0]

    def kernel(t: Any) -> Any:
        def at(*i: Any) -> Any:
            keep = i[-1] - i[-2] >= k if upper else i[-1] - i[-2] <= k
            return tirx.Select(keep, t(*i), tirx.const(0, t.dtype))

        return te.compute(t.shape, at, name="trilu")

    return node.te(kernel, node[0])


@converter("EyeLike")
def eye_like(node: Node) -> Expr:
    dims = node.shape(0)
    dtype = str(helper.tensor_dtype_to_np_dtype(node.attrs["dtype"])) if "dtype" in node.attrs else node.dtype(0)
    k = int(node.attr("k", 0))
    if all(isinstance(d, int) for d in dims):
        return node.const(np.eye(dims[0], dims[1], k), dtype)

    def kernel(out: Any) -> Any:
        return te.compute(
            tuple(out),
            lambda i, j: tirx.Select(j - i == k, tirx.const(1, dtype), tirx.const(0, dtype)),
            name="eye",
        )

    return node.te(kernel, as_exprs(dims))


@converter("ReverseSequence")
def reverse_sequence(node: Node) -> Expr:
    dims = node.shape(0)
    time, batch = int(node.attr("time_axis", 0)), int(node.attr("batch_axis", 1))

    def kernel(t: Any, lengths: Any) -> Any:
        def at(*i: Any) -> Any:
            n = lengths(i[batch]).astype("int64")
            k = tirx.Select(i[time] < n, n - 1 - i[time], i[time])
            k = tirx.max(tirx.min(k, t.shape[time] - 1), tirx.const(0, "int64"))
            return t(*[k if a == time else v for a, v in enumerate(i)])

        return te.compute(t.shape, at, name="reverse_sequence")

    del dims
    return node.te(kernel, node[0], node[1])


@converter("Pad")
def pad(node: Node) -> Expr:
    x = node[0]
    dims = node.shape(0)
    rank = len(dims)
    mode = node.attr("mode", "constant")
    fill: Expr | None = None
    if node.opset < 11:
        amounts: list[Any] = list(node.attr("pads", node.attr("paddings", [])))
        fill = node.const(node.attr("value", 0.0), dtype_of(x))
    else:
        from tvmx.frontend.node import simplify

        amounts = [simplify(v) for v in node.known(1, "pads").reshape(-1)]
        fill = node.get(2)
    axes = list(range(rank))
    if node.has(3):
        axes = [node.axis(a, rank) for a in node.known_ints(3, "axes")]
    if len(amounts) != 2 * len(axes):
        raise node.fail(f"{len(amounts)} pads for {len(axes)} axes")
    before, after = [0] * rank, [0] * rank
    for k, a in enumerate(axes):
        before[a], after[a] = amounts[k], amounts[len(axes) + k]
    if not any(isinstance(p, int) is False or p for p in (*before, *after)):
        return x
    numbers = all(isinstance(p, int) for p in (*before, *after))
    value = const_of(fill) if fill is not None else np.zeros(())
    if mode == "constant" and numbers and min(*before, *after, 0) >= 0 and value is not None:
        widths = [w for b, a in zip(before, after) for w in (b, a)]
        number = value.reshape(-1)[0].item()
        if dtype_of(x) != "bool":
            return node.emit(R.nn.pad(x, widths, pad_value=number, pad_mode="constant"))
    if mode not in ("constant", "reflect", "edge", "wrap"):
        raise node.fail(f"mode {mode!r} is unknown")
    if fill is None:
        fill = node.const(0, dtype_of(x))

    def kernel(t: Any, value: Any, first: Any, extent: Any) -> Any:
        first = list(first)

        def at(*i: Any) -> Any:
            place, inside = [], []
            for k, (p, f, d) in enumerate(zip(i, first, t.shape)):
                q = p - f
                if isinstance(before[k], int) and isinstance(after[k], int):
                    if before[k] == 0 and after[k] == 0:
                        place.append(p)
                        continue
                if mode == "constant":
                    inside.append(tirx.all(q >= 0, q < d))
                elif mode == "edge":
                    q = tirx.max(tirx.min(q, d - 1), 0)
                elif mode == "wrap":
                    q = tirx.floormod(q, d)
                else:  # reflect: period 2(d - 1) without repeating the border
                    period = tirx.max(2 * (d - 1), 1)
                    q = tirx.floormod(q, period)
                    q = tirx.Select(q < d, q, period - q)
                place.append(q)
            if mode != "constant":
                return t(*place)
            return tirx.if_then_else(tirx.all(*inside), t(*place), value(*[0] * len(value.shape)))

        return te.compute(tuple(extent), at, name="pad")

    extent = [d + b + a for d, b, a in zip(dims, before, after)]
    if numbers and any(isinstance(d, int) and d < 0 for d in extent):
        raise node.fail(f"pads {amounts} remove more than there is of {dims}")
    return node.te(kernel, x, fill, as_exprs(before), as_exprs(extent))


@converter("CenterCropPad")
def center_crop_pad(node: Node) -> Expr:
    x = node[0]
    dims = node.int_shape(0)
    target = node.known_ints(1, "the target shape")
    axes = [node.axis(a, len(dims)) for a in node.attr("axes", range(len(dims)))]
    first, out = [0] * len(dims), list(dims)
    for a, t in zip(axes, target):
        out[a] = t
        # The odd element of a crop stays at the end, that of a pad too.
        first[a] = (dims[a] - t) // 2 if t <= dims[a] else -((t - dims[a]) // 2)

    def kernel(t: Any) -> Any:
        def at(*i: Any) -> Any:
            place = [p + f for p, f in zip(i, first)]
            inside = [tirx.all(q >= 0, q < d) for q, d in zip(place, t.shape)]
            return tirx.if_then_else(tirx.all(*inside), t(*place), tirx.const(0, t.dtype))

        return te.compute(out, at, name="center_crop_pad")

    return node.te(kernel, x)


@converter("DepthToSpace")
def depth_to_space(node: Node) -> Expr:
    b, c, h, w = node.shape(0)
    s = int(node.attrs["blocksize"])
    if node.attr("mode", "DCR") == "DCR":
        wide, perm = [b, s, s, c // (s * s), h, w], [0, 3, 4, 1, 5, 2]
    else:
        wide, perm = [b, c // (s * s), s, s, h, w], [0, 1, 4, 2, 5, 3]
    y = node.emit(R.permute_dims(reshape(node, node[0], wide), perm))
    return reshape(node, y, [b, c // (s * s), h * s, w * s])


@converter("SpaceToDepth")
def space_to_depth(node: Node) -> Expr:
    b, c, h, w = node.shape(0)
    s = int(node.attrs["blocksize"])
    wide = reshape(node, node[0], [b, c, h // s, s, w // s, s])
    depth_first = node.attr("mode", "DCR") == "DCR"
    y = node.emit(R.permute_dims(wide, [0, 3, 5, 1, 2, 4] if depth_first else [0, 1, 3, 5, 2, 4]))
    return reshape(node, y, [b, c * s * s, h // s, w // s])


@converter("Compress")
def compress(node: Node) -> Expr:
    condition = node.known(1, "the condition")
    x = node[0]
    if "axis" not in node.attrs:
        x, axis = reshape(node, x, [product(node.shape(0))]), 0
    else:
        axis = node.axis(node.attrs["axis"], node.rank(0))
    chosen = np.flatnonzero(condition)
    dims = node.dims(x)
    if isinstance(dims[axis], int) and chosen.size and chosen.max() >= dims[axis]:
        raise node.fail(f"the condition selects element {chosen.max()} of {dims[axis]}")
    if not chosen.size:
        return node.const(np.zeros([0 if i == axis else d for i, d in enumerate(dims)]), dtype_of(x))

    def kernel(t: Any, ind: Any) -> Any:
        return te.compute(
            (*t.shape[:axis], len(chosen), *t.shape[axis + 1 :]),
            lambda *i: t(*i[:axis], ind(i[axis]), *i[axis + 1 :]),
            name="compress",
        )

    return node.te(kernel, x, constant(chosen.astype(np.int64)))
