"""Operators that ONNX itself defines by a function body, replaced by that body."""

from __future__ import annotations

import onnx
from onnx import helper

from tvmx.frontend.rewrite.context import Refuse, subgraphs
from tvmx.frontend.rewrite.inline import Body
from tvmx.frontend.rewrite.rule import GIVE_SHAPES, Match, RewriteRule

OPS = (
    "BlackmanWindow",
    "CausalConvWithState",
    "Celu",
    "CenterCropPad",
    "HammingWindow",
    "HannWindow",
    "LinearAttention",
    "NegativeLogLikelihoodLoss",
    "RotaryEmbedding",
    "SoftmaxCrossEntropyLoss",
    "SwiGLU",
    "Swish",
)


def expand(m: Match) -> list[str]:
    """The function body of the schema for the model's opset, attributes filled in."""
    node = m.node
    schema = onnx.defs.get_schema(node.op_type, m.graph.opset, "")
    function = _function(m, schema)
    values = {name: spec.default_value for name, spec in schema.attributes.items() if spec.default_value.name}
    values.update({a.name: a for a in node.attribute})
    nodes = []
    for inner in function.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(inner)
        _fill_attributes(copy, values)
        nodes.append(copy)
    actuals = [m.input(k) for k in range(len(function.input))]
    results = Body(m, function.input, function.output, nodes).inline(actuals)
    return [results[k] if k < len(results) else "" for k in range(len(node.output))]


def _function(m: Match, schema: onnx.defs.OpSchema) -> onnx.FunctionProto:
    # A body registered for an older opset serves as long as its operators kept their meaning, which
    # those of OPS did.
    versions = schema.function_opset_versions or schema.context_dependent_function_opset_versions
    version = max((v for v in versions if v <= m.graph.opset), default=0)
    function = onnx.FunctionProto()
    if schema.has_function:
        body = schema.get_function_with_opset_version(version)
    else:
        types = []
        for name in m.node.input:
            known = m.graph.type(name) if name else None
            if name and known is None:
                raise Refuse(f"the type of {name!r} is unknown", GIVE_SHAPES)
            proto = helper.make_tensor_type_proto(known.elem, known.shape) if known else onnx.TypeProto()
            types.append(proto.SerializeToString())
        body = schema.get_context_dependent_function_with_opset_version(version, m.node.SerializeToString(), types)
    if not body:
        raise Refuse(f"ONNX has no definition of it for opset {m.graph.opset}", "convert the model to a newer opset")
    function.ParseFromString(body)
    return function


def _fill_attributes(node: onnx.NodeProto, values: dict[str, onnx.AttributeProto]) -> None:
    """Replace references to the function's attributes by values; one without a value is dropped."""
    kept = []
    for attr in node.attribute:
        if attr.ref_attr_name:
            if attr.ref_attr_name not in values:
                continue
            filled = onnx.AttributeProto()
            filled.CopyFrom(values[attr.ref_attr_name])
            filled.name = attr.name
            kept.append(filled)
        else:
            kept.append(attr)
    kept = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in kept]
    del node.attribute[:]
    node.attribute.extend(kept)
    for graph in subgraphs(node):
        for inner in graph.node:
            _fill_attributes(inner, values)


RULES = tuple(RewriteRule(f"define_{op}", (op,), expand) for op in OPS)
