"""Whether computing an operator in integers saves more than quantising what it reads costs: a model in bytes and MACs.

The hook is replaceable: `make_plan(..., cost=)` takes any function of a `LayerCost` and the target.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from onnx import NodeProto

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


CostHook = Callable[[LayerCost, Target], "str | None"]

# Nanoseconds on one core, fitted to nothing finer than their ratios: an element quantised on the way in, and MACs a
# nanosecond in float32 and int8 by instruction set.
QUANTIZE_NS = 0.12
WEIGHT_BYTES_PER_NS = 8.0
ACTIVATION_BYTES_PER_NS = 32.0


def modelled(cost: LayerCost, target: Target) -> str | None:
    """The reason to leave an operator in float, or None: time saved on MACs and weights against rounding its inputs."""
    float_rate = target.vector_bytes / 4 * 2 * 2.0  # lanes × two units × 2 GHz
    gain = 4.0 if target.has("avx512_vnni") or target.has("avx_vnni") or target.has("asimddp") else 1.6
    if cost.depthwise:
        gain = min(gain, 1.5)
    saved = cost.macs / float_rate * (1 - 1 / gain) + cost.weight_elements * 3 / WEIGHT_BYTES_PER_NS
    saved += (cost.input_elements - cost.rounded_elements) * 3 / ACTIVATION_BYTES_PER_NS
    spent = cost.rounded_elements * QUANTIZE_NS
    if saved >= spent:
        return None
    return f"rounding its {cost.rounded_elements} inputs costs {spent:.0f} ns and saves {saved:.0f} ns by the model"


def layer_cost(graph: OnnxGraph, node: NodeProto, rounded: Container[str]) -> LayerCost | None:
    """Sizes of a heavy operator; None where a shape is not known. `rounded`: tensors that no integer kernel makes."""
    shapes = [graph.shape(name) for name in (*node.input[:2], node.output[0])]
    if any(s is None or not all(isinstance(d, int) for d in s) for s in shapes):
        return None
    x, w, y = (tuple(int(d) for d in s or ()) for s in shapes)
    sizes = [_product(s) for s in (x, w, y)]
    group = int(attribute(node, "group", 1))
    if node.op_type == "Conv":
        macs = sizes[2] * _product(w[1:])
    elif node.op_type == "ConvTranspose":
        macs = sizes[0] * _product(w[1:])
    else:
        depth = x[-2] if node.op_type == "Gemm" and attribute(node, "transA", 0) else x[-1]
        macs = sizes[2] * depth
    operands = [k for k in (0, 1) if not graph.is_constant(node.input[k])]
    computed = sum(sizes[k] for k in operands)
    by_itself = sum(sizes[k] for k in operands if node.input[k] in rounded)
    constant = sum(sizes[k] for k in (0, 1) if graph.is_constant(node.input[k]))
    depthwise = node.op_type == "Conv" and group > 1 and group == w[0]
    return LayerCost(node.op_type, macs, computed, by_itself, sizes[2], constant, depthwise)


def _product(dims: tuple[int, ...]) -> int:
    total = 1
    for d in dims:
        total *= d
    return total
