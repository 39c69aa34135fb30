"""Shape inference over a skeleton of the model: large weights are declared, not copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tvmx.frontend.rewrite.context import TensorType, type_of

_SMALL = 256  # elements; shapes, axes and pads fit, weights do not


def infer_types(
    nodes: Iterable[onnx.NodeProto],
    inputs: Iterable[onnx.ValueInfoProto],
    constants: Mapping[str, Any],
    opsets: Mapping[str, int],
    ir_version: int,
) -> dict[str, TensorType]:
    """Types of all values that ONNX's own inference can tell (data propagation on).

    Also works for models beyond protobuf's 2 GB, since no weight is serialised.
    """
    graph = onnx.GraphProto(name="skeleton")
    graph.node.extend(nodes)
    known: dict[str, TensorType] = {}
    for value in inputs:
        if value.name not in constants:
            graph.input.append(value)
            if (declared := type_of(value.type)) is not None:
                known[value.name] = declared
    for name, value in constants.items():
        if isinstance(value, onnx.TensorProto):
            elem, shape = value.data_type, tuple(value.dims)
        else:
            elem, shape = helper.np_dtype_to_tensor_dtype(value.dtype), tuple(value.shape)
        known[name] = TensorType(elem, shape)
        size = int(np.prod(shape, dtype=object))
        if size > _SMALL:
            graph.input.append(helper.make_tensor_value_info(name, elem, shape))
        elif isinstance(value, onnx.TensorProto):
            graph.initializer.append(value)
        else:
            graph.initializer.append(numpy_helper.from_array(value, name))
    model = onnx.ModelProto(ir_version=max(ir_version, 4), graph=graph)
    model.opset_import.extend(helper.make_opsetid(d, v) for d, v in opsets.items())
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, RuntimeError):
        # Data propagation stumbled on something; without it less is known, nothing is wrong.
        inferred = onnx.shape_inference.infer_shapes(model).graph
    for info in inferred.value_info:
        if (declared := type_of(info.type)) is not None:
            known[info.name] = declared
    return known


def infer_node(
    node: onnx.NodeProto,
    types: Mapping[str, TensorType],
    data: Mapping[str, Any],
    opsets: Mapping[str, int],
) -> dict[str, TensorType]:
    """Types of one new node's outputs; empty when ONNX does not know the operator.

    `data` are constants (shapes, axes) among the inputs.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
        made = onnx.shape_inference.infer_node_outputs(
            schema,
            node,
            {n: _proto_of(types[n]) for n in node.input if n in types},
            {n: numpy_helper.from_array(v, n) for n, v in data.items()},
            opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()],
        )
    except (
        onnx.defs.SchemaError,
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        RuntimeError,
        KeyError,
    ):
        return {}
    return {name: known for name, proto in made.items() if (known := type_of(proto)) is not None}


def _proto_of(known: TensorType) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(known.elem, known.shape)
