"""Operators without a converter of ours: TVM's own converter where it is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend as stock

from tvmx.frontend.node import Node

# The stock converters that pass the conformance tests or were checked by hand; every other operator
# has a converter of ours or none.
TRUSTED = {
    "": {"Einsum", "GridSample", "MaxRoiPool", "NonMaxSuppression", "NonZero", "Unique"},
    "com.microsoft": {"BiasGelu", "FastGelu"},
}


def serves(domain: str, op: str) -> bool:
    return op in TRUSTED.get(domain, ())


def find(node: Node) -> Callable[[Node], Any] | None:
    """A converter for the node, or None."""
    return _stock if serves(node.domain, node.op) else None


def _stock(node: Node) -> Any:
    cls = stock._get_convert_map()[node.op]
    attrs: dict[str, Any] = {}
    for a in node.proto.attribute:
        attrs[a.name] = a.t if a.HasField("t") else helper.get_attribute_value(a)
        if isinstance(attrs[a.name], list):
            attrs[a.name] = tuple(attrs[a.name])
    attrs["tvm_custom"] = {"name": node.proto.name, "num_outputs": node.num_outputs}
    inputs = stock.onnx_input(node.inputs)
    threshold = node.static(3) if node.op == "NonMaxSuppression" else None
    if threshold is not None:
        # ONNX suppresses what overlaps by more than the threshold, TVM also what overlaps by just as much.
        inputs[3] = node.const(np.nextafter(threshold, np.float32(np.inf)), "float32")
    # Graph lookups of the stock converters serve parameters kept as inputs; ours are constants.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = cls.get_converter(node.opset if not node.domain else 1)(node.bb, inputs, attrs, [{}, {}])
    result = node.norm(result)
    if isinstance(result, relax.Tuple):
        return list(result.fields)
    if isinstance(result.ty, relax.TupleType):
        bound = node.emit(result)
        return [node.emit(relax.TupleGetItem(bound, i)) for i in range(len(bound.ty.fields))]
    return result
