"""TIR kernels for operators that no combination of TE computes expresses: scatter, sort, select.

Each works on flat views of dense buffers, one serial inner loop with a parallel outer one where rows
are independent. Indices taken from data are clamped here, so that nothing is read or written astray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

Tensor = Any
Body = Callable[..., None]


def extern(shapes: Sequence[Any], dtypes: Sequence[str], inputs: Sequence[Tensor], body: Body, name: str) -> Any:
    """A kernel written with the TIR builder: `body(*input views, *output views)`, flat indexing."""

    def generate(ins: Any, outs: Any) -> Any:
        with IRBuilder() as ib:
            with T.seq_scope():
                body(*(T.buffer_proxy(b) for b in (*ins, *outs)))
            return ib.get()

    return te.extern(
        [tuple(s) for s in shapes],
        list(inputs),
        generate,
        dtype=list(dtypes),
        out_buffers=[
            tirx.decl_buffer(tuple(s), d, f"{name}_out{i}", layout=None) for i, (s, d) in enumerate(zip(shapes, dtypes))
        ],
        name=name,
    )


def lowest(dtype: Any) -> Any:
    name = str(dtype.dtype) if hasattr(dtype, "dtype") else str(dtype)
    if name.startswith(("float", "bfloat")):
        return tirx.const(-math.inf, name)
    return tirx.min_value(name)


def highest(dtype: Any) -> Any:
    name = str(dtype.dtype) if hasattr(dtype, "dtype") else str(dtype)
    if name.startswith(("float", "bfloat")):
        return tirx.const(math.inf, name)
    return tirx.max_value(name)


# te.max starts from the lowest finite number, which is wrong for a row of -inf.
maximum = te.comm_reducer(lambda a, b: tirx.max(a, b), lowest, name="maximum")
minimum = te.comm_reducer(lambda a, b: tirx.min(a, b), highest, name="minimum")


def size_of(dims: Sequence[Any]) -> Any:
    total: Any = 1
    for d in dims:
        total = total * d
    return total


def wrap(index: Any, size: Any) -> Any:
    """A valid index: negative ones count from the end, what is still outside is clamped."""
    index = index.astype("int64")
    index = tirx.Select(index < 0, index + size, index)
    return tirx.max(tirx.min(index, size - 1), tirx.const(0, "int64"))


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": tirx.max,
    "min": tirx.min,
}


def scatter_elements(axis: int, reduction: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    combine = REDUCTIONS[reduction]

    def kernel(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        dims, idims = list(data.shape), list(indices.shape)

        def body(x: Any, ind: Any, upd: Any, out: Any) -> None:
            with T.serial(0, size_of(dims)) as i:
                out[i] = x[i]
            with T.serial(0, size_of(idims)) as p:
                rest, place, stride = p, 0, 1
                for a in range(len(dims) - 1, -1, -1):
                    k = tirx.floormod(rest, idims[a])
                    rest = tirx.floordiv(rest, idims[a])
                    place = place + (wrap(ind[p], dims[a]) if a == axis else k) * stride
                    stride = stride * dims[a]
                out[place] = combine(out[place], upd[p])

        return extern([dims], [data.dtype], [data, indices, updates], body, "scatter_elements")

    return kernel


def scatter_nd(depth: int, reduction: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`depth` is the length of an index tuple, the last dim of the indices."""
    combine = REDUCTIONS[reduction]

    def kernel(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        dims = list(data.shape)
        rows, row = size_of(indices.shape[:-1]), size_of(dims[depth:])

        def body(x: Any, ind: Any, upd: Any, out: Any) -> None:
            with T.serial(0, size_of(dims)) as i:
                out[i] = x[i]
            with T.serial(0, rows) as r:
                place: Any = tirx.const(0, "int64")
                for k in range(depth):
                    place = place * dims[k] + wrap(ind[r * depth + k], dims[k])
                with T.serial(0, row) as j:
                    out[place * row + j] = combine(out[place * row + j], upd[r * row + j])

        return extern([dims], [data.dtype], [data, indices, updates], body, "scatter_nd")

    return kernel


def top_k(k: int, axis: int, largest: bool) -> Callable[[Tensor], list[Tensor]]:
    """Values and int64 indices of the k largest (smallest), best first; ties by lower index.

    The k best so far are a heap with the worst at its root: most elements cost one comparison, the others log k.
    Taking the root k times sorts them.
    """

    def kernel(x: Tensor) -> list[Tensor]:
        dims = list(x.shape)
        out_dims = [k if i == axis else d for i, d in enumerate(dims)]
        n, inner, outer = dims[axis], size_of(dims[axis + 1 :]), size_of(dims[:axis])

        def body(data: Any, vals: Any, inds: Any) -> None:
            with T.parallel(0, outer * inner) as row:
                o, q = tirx.floordiv(row, inner), tirx.floormod(row, inner)

                def out(j: Any) -> Any:
                    return (o * k + j) * inner + q

                heap = _Heap(vals, inds, out, largest, str(x.dtype))
                with T.serial(0, k) as i:
                    vals[out(i)] = data[(o * n + i) * inner + q]
                    inds[out(i)] = i.astype("int64")
                with T.serial(0, k // 2) as i:
                    heap.sink(k // 2 - 1 - i, vals[out(k // 2 - 1 - i)], inds[out(k // 2 - 1 - i)], k)
                with T.serial(0, n - k) as i:
                    value = data[(o * n + k + i) * inner + q]
                    # A tie with the root loses: its index is lower.
                    with T.If(_before(value, vals[out(0)], largest)):
                        with T.Then():
                            heap.sink(0, value, (k + i).astype("int64"), k)
                with T.serial(0, k - 1) as i:
                    end = k - 1 - i
                    heap.pop(end)

        shapes = [out_dims, out_dims]
        return extern(shapes, [x.dtype, "int64"], [x], body, "topk")  # type: ignore[no-any-return]

    return kernel


class _Heap:
    """A heap of (value, index) with the worst at slot 0, in the outputs of `top_k` at `place(slot)`."""

    def __init__(self, vals: Any, inds: Any, place: Callable[[Any], Any], largest: bool, dtype: str) -> None:
        self.vals, self.inds, self.place, self.largest = vals, inds, place, largest
        self.hole = T.buffer_proxy(T.alloc_buffer([3], "int32", scope="local"))  # [where the hole is, going on, child]
        self.value = T.buffer_proxy(T.alloc_buffer([2], dtype, scope="local"))  # [what sinks, spare]
        self.index = T.buffer_proxy(T.alloc_buffer([2], "int64", scope="local"))

    def worse(self, value: Any, index: Any, other: Any, other_index: Any) -> Any:
        """Does (value, index) come after the other?"""
        return tirx.Or(_before(other, value, self.largest), tirx.all(value == other, index > other_index))

    def sink(self, slot: Any, value: Any, index: Any, size: Any) -> None:
        """Put (value, index) at `slot` and let it sink until no child is worse, in a heap of `size`."""
        hole, place, vals, inds = self.hole, self.place, self.vals, self.inds
        self.value[0] = value
        self.index[0] = index
        hole[0] = tirx.Cast("int32", slot) if not isinstance(slot, int) else slot
        hole[1] = 1
        with T.While(hole[1] == 1):
            hole[2] = hole[0] * 2 + 1
            with T.If(hole[2] >= size):
                with T.Then():
                    hole[1] = 0
                with T.Else():
                    left, right = hole[2], tirx.min(hole[2] + 1, size - 1)
                    with T.If(self.worse(vals[place(right)], inds[place(right)], vals[place(left)], inds[place(left)])):
                        with T.Then():
                            hole[2] = right
                    pick = hole[2]
                    with T.If(self.worse(vals[place(pick)], inds[place(pick)], self.value[0], self.index[0])):
                        with T.Then():
                            vals[place(hole[0])] = vals[place(pick)]
                            inds[place(hole[0])] = inds[place(pick)]
                            hole[0] = pick
                        with T.Else():
                            hole[1] = 0
        vals[place(hole[0])] = self.value[0]
        inds[place(hole[0])] = self.index[0]

    def pop(self, end: Any) -> None:
        """Move the worst to slot `end`, the last of the heap, which then ends before it."""
        vals, inds, place = self.vals, self.inds, self.place
        self.value[1] = vals[place(0)]
        self.index[1] = inds[place(0)]
        self.sink(0, vals[place(end)], inds[place(end)], end)
        vals[place(end)] = self.value[1]
        inds[place(end)] = self.index[1]


def _before(a: Any, b: Any, largest: bool) -> Any:
    return a > b if largest else a < b


def sort_rows(axis: int, descending: bool) -> Callable[[Tensor], list[Tensor]]:
    """int64 order that sorts each row, stable, by merging runs of growing length.

    Returns [order, scratch]; the scratch is an output because kernels allocate nothing.
    """

    def kernel(x: Tensor) -> list[Tensor]:
        dims = list(x.shape)
        n = int(dims[axis])
        inner, outer = size_of(dims[axis + 1 :]), size_of(dims[:axis])
        rounds = max(n - 1, 0).bit_length()

        def body(data: Any, order: Any, scratch: Any) -> None:
            with T.parallel(0, outer * inner) as row:
                o, q = tirx.floordiv(row, inner), tirx.floormod(row, inner)

                def at(j: Any) -> Any:
                    return (o * n + j) * inner + q

                # The last round must end in `order`.
                source, target = (order, scratch) if rounds % 2 == 0 else (scratch, order)
                with T.serial(0, n) as i:
                    source[at(i)] = i.astype("int64")
                for step in range(rounds):
                    _merge(data, source, target, at, n, 1 << step, descending)
                    source, target = target, source

        shapes = [dims, dims]
        return extern(shapes, ["int64", "int64"], [x], body, "sort")  # type: ignore[no-any-return]

    return kernel


def _merge(data: Any, source: Any, target: Any, at: Any, n: int, width: int, descending: bool) -> None:
    """Merge neighbouring runs of `width` indices from source into target."""
    cursor = T.buffer_proxy(T.alloc_buffer([2], "int32", scope="local"))
    with T.serial(0, -(-n // (2 * width))) as pair:
        start = pair * (2 * width)
        middle = tirx.min(start + width, n)
        end = tirx.min(start + 2 * width, n)
        cursor[0] = start
        cursor[1] = middle
        with T.serial(0, end - start) as p:
            left, right = cursor[0], cursor[1]
            # Reads past a run are clamped into the row; their result is not used.
            a = source[at(tirx.min(left, n - 1))]
            b = source[at(tirx.min(right, n - 1))]
            right_first = _before(data[at(b)], data[at(a)], descending)
            take_right = tirx.all(right < end, tirx.Or(left >= middle, right_first))
            with T.If(take_right):
                with T.Then():
                    target[at(start + p)] = b
                    cursor[1] = right + 1
                with T.Else():
                    target[at(start + p)] = a
                    cursor[0] = left + 1


def scan(axis: int, exclusive: bool, reverse: bool, product: bool) -> Callable[[Tensor], Tensor]:
    """Cumulative sum or product along an axis. Values side by side (later axes) advance together."""

    def kernel(x: Tensor) -> Tensor:
        dims = list(x.shape)
        n, inner, outer = dims[axis], size_of(dims[axis + 1 :]), size_of(dims[:axis])
        start = tirx.const(1 if product else 0, x.dtype)

        def combine(a: Any, b: Any) -> Any:
            return a * b if product else a + b

        def row(data: Any, out: Any, o: Any) -> None:
            total = T.buffer_proxy(T.alloc_buffer([1], x.dtype, scope="local"))
            total[0] = start
            with T.serial(0, n) as i:
                at = o * n + (n - 1 - i if reverse else i)
                if exclusive:
                    out[at] = total[0]
                total[0] = combine(total[0], data[at])
                if not exclusive:
                    out[at] = total[0]

        def rows(data: Any, out: Any, o: Any) -> None:
            with T.serial(0, inner) as q:
                first = (o * n + (n - 1 if reverse else 0)) * inner + q
                out[first] = start if exclusive else data[first]
            with T.serial(0, n - 1) as i:
                j = n - 2 - i if reverse else i + 1
                before = j + 1 if reverse else j - 1
                with T.serial(0, inner) as q:
                    at, last = (o * n + j) * inner + q, (o * n + before) * inner + q
                    out[at] = combine(out[last], data[last if exclusive else at])

        def body(data: Any, out: Any) -> None:
            with T.parallel(0, outer) as o:
                row(data, out, o) if isinstance(inner, int) and inner == 1 else rows(data, out, o)

        return extern([dims], [x.dtype], [x], body, "cumulative")

    return kernel


def max_unpool(out_dims: Sequence[Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Values at their flat indices, zero elsewhere."""

    def kernel(x: Tensor, indices: Tensor) -> Tensor:
        total = size_of(out_dims)

        def body(data: Any, ind: Any, out: Any) -> None:
            with T.serial(0, total) as i:
                out[i] = tirx.const(0, x.dtype)
            with T.serial(0, size_of(x.shape)) as i:
                out[wrap(ind[i], tirx.const(int(total), "int64"))] = data[i]

        return extern([out_dims], [x.dtype], [x, indices], body, "max_unpool")

    return kernel
