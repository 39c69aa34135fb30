"""Whether computing an operator in integers saves more than quantising what it reads costs.

Times come from a model (`tvmx.passes.legalize.integer_model`) or are measured (`tvmx.quantize.timing`). The hook is
replaceable: `make_plan(..., cost=)` takes any function of a `LayerCost` and the target.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from onnx import NodeProto

from tvmx.passes.legalize import integer_model
from tvmx.passes.legalize.integer_model import Work
from tvmx.quantize.graph import OnnxGraph, attribute
from tvmx.target import Target


@dataclass(frozen=True)
class LayerCost:
    """Sizes of one heavy operator: multiply-adds, elements of its activations and results, elements of its weight."""

    op: str
    macs: int
    input_elements: int
    rounded_elements: int  # of these, what no integer kernel before makes
    output_elements: int
    weight_elements: int
    depthwise: bool
    work: Work
    name: str = ""


CostHook = Callable[[LayerCost, Target], "str | None"]

MARGIN = 0.98  # of the float time: a layer that gains less is left as it is


def modelled(cost: LayerCost, target: Target) -> str | None:
    """The reason to leave an operator in float, or None: predicted cycles of both, with the rounding of its inputs."""
    wide = integer_model.float_cycles(cost.work, target)
    narrow = integer_model.integer_cycles(cost.work, target)
    spent = integer_model.rounding_cycles(cost.rounded_elements, target)
    if narrow + spent <= wide * MARGIN:
        return None
    rounding = f" and {spent:.0f} to round its input" if spent else ""
    return f"int8 would be slower by the model: {narrow:.0f} cycles{rounding}, {wide:.0f} in float"


def measured(times: Mapping[str, tuple[float, float]]) -> CostHook:
    """A hook by measured seconds of each layer, (float, int8) by name; layers without are left to the model.

    Rounding an input that no integer kernel makes counts as the model has it, in shares of the float time.
    """

    def hook(cost: LayerCost, target: Target) -> str | None:
        if cost.name not in times:
            return modelled(cost, target)
        wide, narrow = times[cost.name]
        cycles = max(integer_model.float_cycles(cost.work, target), 1.0)
        spent = wide * integer_model.rounding_cycles(cost.rounded_elements, target) / cycles
        if narrow + spent <= wide * MARGIN:
            return None
        rounding = f" and {spent * 1e6:.1f} to round its input" if spent else ""
        return f"measured slower in int8: {narrow * 1e6:.1f} µs{rounding}, {wide * 1e6:.1f} in float"

    return hook


def layer_cost(
    graph: OnnxGraph, node: NodeProto, rounded: Container[str], name: str = "", weight_limit: int = 127
) -> LayerCost | None:
    """Sizes of a heavy operator; None where a shape is not known. `rounded`: tensors that no integer kernel makes."""
    shapes = [graph.shape(name) for name in (*node.input[:2], node.output[0])]
    if any(s is None or not all(isinstance(d, int) for d in s) for s in shapes):
        return None
    x, w, y = (tuple(int(d) for d in s or ()) for s in shapes)
    sizes = [_product(s) for s in (x, w, y)]
    if 0 in sizes:
        return None
    group = int(attribute(node, "group", 1))
    operands = [k for k in (0, 1) if not graph.is_constant(node.input[k])]
    computed = sum(sizes[k] for k in operands)
    by_itself = sum(sizes[k] for k in operands if node.input[k] in rounded)
    constant = sum(sizes[k] for k in (0, 1) if graph.is_constant(node.input[k]))
    depthwise = node.op_type == "Conv" and group > 1 and group == w[0]
    small = weight_limit <= 64
    if node.op_type == "Conv":
        macs = sizes[2] * _product(w[1:])
        work = _conv_work(node, x, w, y, group, computed, constant, small)
    elif node.op_type == "ConvTranspose":
        macs = sizes[0] * _product(w[1:])
        phases = _product(w[2:])  # of the dense convolution that the kernels compute, its taps counted as channels
        depth, height, width = x[1] // group, _product(x[2:-1]), x[-1]
        work = Work(x[0], height, width, depth, w[1] * phases * group, (1, 1), (1, 1), group, computed, constant, small)
    else:
        depth = x[-2] if node.op_type == "Gemm" and attribute(node, "transA", 0) else x[-1]
        macs = sizes[2] * depth
        rows, columns = (y[-2] if len(y) > 1 else 1), y[-1]
        outer = sizes[2] // max(1, rows * columns)
        if constant and len(w) <= 2:
            rows, outer = rows * outer, 1
        work = Work(outer, 1, rows, depth, columns, inputs=computed, weights=constant, small=small)
    return LayerCost(node.op_type, macs, computed, by_itself, sizes[2], constant, depthwise, work, name)


def _conv_work(
    node: NodeProto,
    x: tuple[int, ...],
    w: tuple[int, ...],
    y: tuple[int, ...],
    group: int,
    inputs: int,
    weights: int,
    small: bool,
) -> Work:
    """A convolution of any rank: what is not the last axis counts as rows."""
    strides = [int(v) for v in attribute(node, "strides", [1] * (len(w) - 2))]
    return Work(
        y[0],
        _product(y[2:-1]),
        y[-1],
        w[1],
        w[0],
        (_product(w[2:-1]), w[-1]),
        (max(strides[:-1], default=1), strides[-1]),
        group,
        inputs,
        weights,
        small,
    )


def _product(dims: tuple[int, ...]) -> int:
    total = 1
    for d in dims:
        total *= d
    return total
