"""Image operators: resize, region pooling, column-to-image, unpooling, deformable convolution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.relax import op as R
from tvm.script.ir_builder import tirx as T

from tvmx.frontend import kernels
from tvmx.frontend.node import Expr, Node, constant, converter, dtype_of, np_dtype, simplify
from tvmx.frontend.ops_index import guard_indices
from tvmx.frontend.resize import Axis


def _sizes(node: Node, dims: list[Any]) -> tuple[list[Any], list[float]]:
    """Output dims and scales of a Resize or Upsample node, one per axis."""
    rank = len(dims)
    axes = [node.axis(a, rank) for a in node.attr("axes", range(rank))]
    out: list[Any] = list(dims)
    scales = [1.0] * rank
    legacy = node.op == "Upsample" or node.opset < 11
    if legacy and not node.has(1):
        given = [float(s) for s in node.attrs["scales"]]
    elif legacy:
        given = [float(s) for s in node.known(1, "the scales").reshape(-1)]
    elif node.has(2) and (node.static(2) is None or node.known(2, "the scales").size):
        given = [float(s) for s in node.known(2, "the scales").reshape(-1)]
    else:
        wanted = [simplify(s) for s in node.known(3, "the sizes").reshape(-1)]
        policy = node.attr("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            pick = min if policy == "not_larger" else max
            scale = pick(w / dims[a] for w, a in zip(wanted, axes))
            for a in axes:
                out[a], scales[a] = math.floor(scale * dims[a] + 0.5), scale
            return out, scales
        for w, a in zip(wanted, axes):
            out[a] = w
            if isinstance(w, int) and isinstance(dims[a], int):
                scales[a] = w / dims[a]
            elif w is not dims[a]:
                ratio = simplify(tirx.floordiv(w, dims[a]))
                scales[a] = float(ratio) if isinstance(ratio, int) else math.nan
        return out, scales
    if len(given) != len(axes):
        raise node.fail(f"{len(given)} scales for {len(axes)} axes")
    for s, a in zip(given, axes):
        scales[a] = s
        if isinstance(dims[a], int):
            out[a] = math.floor(dims[a] * s + 1e-9)
        elif s == int(s):
            out[a] = dims[a] * int(s)
        else:
            raise node.fail(f"the symbolic dim {dims[a]} cannot be scaled by {s}; fix the shape")
    return out, scales


@converter("Resize", "Upsample")
def resize(node: Node) -> Expr:
    x = node[0]
    dims = node.shape(0)
    rank = len(dims)
    out, scales = _sizes(node, dims)
    if all(isinstance(d, int) for d in out) and 0 in out:
        return constant(np.zeros(out, np_dtype(dtype_of(x))))
    legacy = node.op == "Upsample" or node.opset < 11
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(m := node.attr("mode", "nearest"), m)
    coordinates = "asymmetric" if legacy else node.attr("coordinate_transformation_mode", "half_pixel")
    nearest = "floor" if legacy else node.attr("nearest_mode", "round_prefer_floor")
    if mode not in ("nearest", "linear", "cubic"):
        raise node.fail(f"mode {mode!r} is unknown")
    antialias = bool(node.attr("antialias", 0)) and mode != "nearest"
    moved = [a for a in range(rank) if scales[a] != 1.0 or coordinates == "tf_crop_and_resize"]
    if not moved:
        return x
    standard = (
        rank == 4
        and set(moved) <= {2, 3}
        and coordinates in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
        and mode in ("nearest", "linear")
        and not antialias
        and not node.attr("exclude_outside", 0)
        and all(scales[a] == scales[a] and scales[a] >= 1 and scales[a] == int(scales[a]) for a in (2, 3))
        and not any(isinstance(out[a], int) and out[a] == 1 for a in (2, 3))
    )
    if standard:
        return node.emit(
            R.image.resize2d(
                x,
                relax.ShapeExpr([tirx.const(d, "int64") if isinstance(d, int) else d for d in out[2:]]),
                roi=[0.0] * 4,
                layout="NCHW",
                method="nearest_neighbor" if mode == "nearest" else "linear",
                coordinate_transformation_mode=coordinates,
                rounding_method=nearest,
            )
        )
    if not all(isinstance(d, int) for a in moved for d in (dims[a], out[a])):
        raise node.fail(f"this kind of resize needs fixed sizes instead of {dims} → {out}; fix them with --shape")
    roi = _roi(node, rank) if coordinates == "tf_crop_and_resize" else [(0.0, 1.0)] * rank
    outside = np.zeros((), bool)
    for a in moved:
        axis = Axis(
            dims[a], out[a], scales[a], coordinates, mode, nearest,
            float(node.attr("cubic_coeff_a", -0.75)), bool(node.attr("exclude_outside", 0)),
            antialias, roi[a],
        )  # fmt: skip
        index, weight, beyond = axis.table()
        x = _apply(node, x, a, index, weight)
        outside = outside | beyond.reshape([-1 if i == a else 1 for i in range(rank)])
    if coordinates == "tf_crop_and_resize" and outside.any():
        fill = node.const(float(node.attr("extrapolation_value", 0.0)), dtype_of(x))
        x = node.emit(R.where(constant(outside), fill, x))
    return x


def _roi(node: Node, rank: int) -> list[tuple[float, float]]:
    roi = [float(v) for v in node.known(1, "the region").reshape(-1)]
    axes = [node.axis(a, rank) for a in node.attr("axes", range(rank))]
    pairs = [(0.0, 1.0)] * rank
    for k, a in enumerate(axes):
        pairs[a] = (roi[k], roi[len(axes) + k])
    return pairs


def _apply(node: Node, x: Expr, axis: int, index: np.ndarray, weight: np.ndarray) -> Expr:
    """Weighted sum of the table's source positions along one axis."""
    count, taps = index.shape
    dtype = dtype_of(x)
    wide = dtype if dtype in ("float32", "float64") else "float32"
    plain = taps == 1 and bool(np.all(weight == 1))

    def kernel(t: Any, ind: Any, w: Any) -> Any:
        shape = [count if a == axis else d for a, d in enumerate(t.shape)]
        if plain:
            return te.compute(shape, lambda *i: t(*i[:axis], ind(i[axis], 0), *i[axis + 1 :]), name="resize")
        k = te.reduce_axis((0, taps), "tap")
        total = te.compute(
            shape,
            lambda *i: te.sum(t(*i[:axis], ind(i[axis], k), *i[axis + 1 :]).astype(wide) * w(i[axis], k), axis=k),
            name="resize",
        )
        if wide == dtype:
            return total
        rounded = dtype.startswith(("int", "uint"))
        return te.compute(
            shape,
            lambda *i: (tirx.nearbyint(total(*i)) if rounded else total(*i)).astype(dtype),
            name="resize_cast",
        )

    return node.te(kernel, x, constant(index), constant(weight.astype(wide)), name="resize")


@converter("RoiAlign")
def roi_align(node: Node) -> Expr:
    dims, rdims = node.shape(0), node.shape(1)
    guard_indices(node, 2, dims[0])
    out_h, out_w = int(node.attr("output_height", 1)), int(node.attr("output_width", 1))
    ratio = int(node.attr("sampling_ratio", 0))
    scale = float(node.attr("spatial_scale", 1.0))
    biggest = node.attr("mode", "avg") == "max"
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    half = node.attr("coordinate_transformation_mode", default) == "half_pixel"

    def kernel(x: Any, rois: Any, batch: Any) -> Any:
        dtype = x.dtype
        n, c, h, w = x.shape
        shape = (rois.shape[0], c, out_h, out_w)

        def f(v: Any) -> Any:
            return tirx.const(v, dtype)

        def body(data: Any, box: Any, which: Any, out: Any) -> None:
            with T.parallel(0, rois.shape[0] * c) as rc:
                r, ch = tirx.floordiv(rc, c), tirx.floormod(rc, c)
                shift = f(0.5 if half else 0.0)
                x1, y1 = box[r * 4] * f(scale) - shift, box[r * 4 + 1] * f(scale) - shift
                wide = box[r * 4 + 2] * f(scale) - shift - x1
                tall = box[r * 4 + 3] * f(scale) - shift - y1
                if not half:
                    wide, tall = tirx.max(wide, f(1)), tirx.max(tall, f(1))
                bin_h, bin_w = tall / f(out_h), wide / f(out_w)
                # An absurd box must not make the loops endless.
                most = tirx.const(1024, "int32")
                grid_h: Any = ratio or tirx.max(tirx.min(tirx.ceil(bin_h).astype("int32"), most), 1)
                grid_w: Any = ratio or tirx.max(tirx.min(tirx.ceil(bin_w).astype("int32"), most), 1)
                base = (kernels.wrap(which[r], n) * c + ch) * h * w
                best = T.buffer_proxy(T.alloc_buffer([1], dtype, scope="local"))

                def at(yy: Any, xx: Any) -> Any:
                    return data[base + yy.astype("int64") * w + xx.astype("int64")]

                with T.serial(0, out_h * out_w) as p:
                    ph, pw = tirx.floordiv(p, out_w), tirx.floormod(p, out_w)
                    best[0] = tirx.min_value(dtype) if biggest else f(0)
                    with T.serial(0, grid_h * grid_w) as g:
                        iy, ix = tirx.floordiv(g, grid_w), tirx.floormod(g, grid_w)
                        y = y1 + ph.astype(dtype) * bin_h + (iy.astype(dtype) + f(0.5)) * bin_h / _as(grid_h, dtype)
                        xx = x1 + pw.astype(dtype) * bin_w + (ix.astype(dtype) + f(0.5)) * bin_w / _as(grid_w, dtype)
                        inside = tirx.all(y >= f(-1), y <= h.astype(dtype), xx >= f(-1), xx <= w.astype(dtype))
                        # NaN fails every comparison, hence Select on the condition that holds.
                        y = tirx.Select(inside, tirx.max(y, f(0)), f(0))
                        xx = tirx.Select(inside, tirx.max(xx, f(0)), f(0))
                        yl = tirx.min(y.astype("int32"), (h - 1).astype("int32"))
                        xl = tirx.min(xx.astype("int32"), (w - 1).astype("int32"))
                        yh, xh = tirx.min(yl + 1, (h - 1).astype("int32")), tirx.min(xl + 1, (w - 1).astype("int32"))
                        ly = tirx.Select(yl >= (h - 1).astype("int32"), f(0), y - yl.astype(dtype))
                        lx = tirx.Select(xl >= (w - 1).astype("int32"), f(0), xx - xl.astype(dtype))
                        hy, hx = f(1) - ly, f(1) - lx
                        corners = [
                            hy * hx * at(yl, xl),
                            hy * lx * at(yl, xh),
                            ly * hx * at(yh, xl),
                            ly * lx * at(yh, xh),
                        ]
                        if biggest:
                            top = tirx.max(tirx.max(corners[0], corners[1]), tirx.max(corners[2], corners[3]))
                            best[0] = tirx.max(best[0], tirx.Select(inside, top, f(0)))
                        else:
                            total = corners[0] + corners[1] + corners[2] + corners[3]
                            best[0] = best[0] + tirx.Select(inside, total, f(0))
                    result = best[0]
                    if not biggest:
                        result = result / _as(grid_h * grid_w, dtype)
                    out[rc * (out_h * out_w) + p] = result

        return kernels.extern([shape], [dtype], [x, rois, batch], body, "roi_align")

    del rdims
    return node.te(kernel, node[0], node[1], node[2])


def _as(v: Any, dtype: str) -> Any:
    return tirx.const(v, dtype) if isinstance(v, int) else v.astype(dtype)


@converter("MaxUnpool")
def max_unpool(node: Node) -> Expr:
    dims = node.int_shape(0)
    n = len(dims) - 2
    kernel = list(node.attrs["kernel_shape"])
    strides = list(node.attr("strides", [1] * n))
    pads = list(node.attr("pads", [0] * (2 * n)))
    out = dims[:2] + [(dims[2 + i] - 1) * strides[i] + kernel[i] - pads[i] - pads[n + i] for i in range(n)]
    y = node.te(kernels.max_unpool(out), node[0], node[1])
    if node.has(2):
        wanted = node.known_ints(2, "the output shape")
        extra = [w - o for w, o in zip(wanted, out)]
        if min(extra) < 0:
            raise node.fail(f"output_shape {wanted} is smaller than {out}")
        if any(extra):
            y = node.emit(R.nn.pad(y, [v for e in extra for v in (0, e)]))
    return y


@converter("Col2Im")
def col2im(node: Node) -> Expr:
    dims = node.shape(0)
    image = node.known_ints(1, "the image shape")
    block = node.known_ints(2, "the block shape")
    n = len(image)
    strides = list(node.attr("strides", [1] * n))
    dilations = list(node.attr("dilations", [1] * n))
    pads = list(node.attr("pads", [0] * (2 * n)))
    steps = [(image[i] + pads[i] + pads[n + i] - (block[i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in range(n)]
    taps = math.prod(block)
    if isinstance(dims[1], int) and (dims[1] % taps or dims[2] != math.prod(steps)):
        raise node.fail(f"an input of shape {dims} does not hold {steps} blocks of {block}")

    def kernel(t: Any) -> Any:
        loops = [te.reduce_axis((0, b), f"k{i}") for i, b in enumerate(block)]

        def at(b: Any, c: Any, *pos: Any) -> Any:
            tap: Any = c
            place: Any = 0
            ok = []
            for i, p in enumerate(pos):
                q = p + pads[i] - loops[i] * dilations[i]
                step = tirx.indexdiv(q, strides[i])
                ok += [q >= 0, tirx.indexmod(q, strides[i]) == 0, step < steps[i]]
                tap = tap * block[i] + loops[i]
                place = place * steps[i] + step
            value = tirx.if_then_else(tirx.all(*ok), t(b, tap, place), tirx.const(0, t.dtype))
            return te.sum(value, axis=loops)

        return te.compute((t.shape[0], tirx.indexdiv(t.shape[1], taps), *image), at, name="col2im")

    return node.te(kernel, node[0])


@converter("DeformConv")
def deform_conv(node: Node) -> Expr:
    dims, wdims, odims = node.int_shape(0), node.int_shape(1), node.int_shape(2)
    if len(dims) != 4:
        raise node.fail(f"an input of rank {len(dims)}; only 2-D deformable convolution works")
    kh, kw = wdims[2:]
    sh, sw = node.attr("strides", [1, 1])
    dh, dw = node.attr("dilations", [1, 1])
    pt, pl = list(node.attr("pads", [0] * 4))[:2]
    groups, offset_groups = int(node.attr("group", 1)), int(node.attr("offset_group", 1))
    oh, ow = odims[2:]
    per_offset = dims[1] // offset_groups
    args = [node[0], node[1], node[2]]
    masked = node.has(4)
    if masked:
        args.append(node[4])

    def kernel(x: Any, w: Any, offset: Any, *mask: Any) -> Any:
        dtype = x.dtype
        _, _, h, wide = (int(d) for d in x.shape)
        zero, one = tirx.const(0, dtype), tirx.const(1, dtype)

        def sampled(b: Any, c: Any, tap: Any, i: Any, j: Any) -> Any:
            group = tirx.indexdiv(c, per_offset)
            channel = (group * (kh * kw) + tap) * 2
            y = (i * sh - pt + tirx.indexdiv(tap, kw) * dh).astype(dtype) + offset(b, channel, i, j)
            q = (j * sw - pl + tirx.indexmod(tap, kw) * dw).astype(dtype) + offset(b, channel + 1, i, j)
            inside = tirx.all(y > -one, y < tirx.const(h, dtype), q > -one, q < tirx.const(wide, dtype))
            y, q = tirx.Select(inside, y, zero), tirx.Select(inside, q, zero)
            y0, q0 = tirx.floor(y), tirx.floor(q)

            def corner(yy: Any, qq: Any) -> Any:
                r, s = yy.astype("int32"), qq.astype("int32")
                ok = tirx.all(inside, r >= 0, r < h, s >= 0, s < wide)
                weight = (one - tirx.abs(y - yy)) * (one - tirx.abs(q - qq))
                return tirx.if_then_else(ok, x(b, c, r, s) * weight, zero)

            value = corner(y0, q0) + corner(y0, q0 + one) + corner(y0 + one, q0) + corner(y0 + one, q0 + one)
            return value * mask[0](b, group * (kh * kw) + tap, i, j) if mask else value

        columns = te.compute((x.shape[0], x.shape[1], kh * kw, oh, ow), sampled, name="deform_columns")
        rc, rk = te.reduce_axis((0, w.shape[1]), "rc"), te.reduce_axis((0, kh * kw), "rk")
        per_out = wdims[0] // groups
        return te.compute(
            (x.shape[0], wdims[0], oh, ow),
            lambda b, o, i, j: te.sum(
                columns(b, tirx.indexdiv(o, per_out) * w.shape[1] + rc, rk, i, j)
                * w(o, rc, tirx.indexdiv(rk, kw), tirx.indexmod(rk, kw)),
                axis=[rc, rk],
            ),
            name="deform_conv",
        )

    y = node.te(kernel, *args)
    if node.has(3):
        from tvmx.frontend.ops_nn import add_bias

        y = add_bias(node, y, node[3])
    return y
