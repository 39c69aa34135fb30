"""Operators without a converter that ONNX itself defines by other operators: put the body in."""

from __future__ import annotations

import onnx.inliner
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TypeProto,
    defs,
    shape_inference,
)

from tvmx.errors import ModelError
from tvmx.frontend import fallback
from tvmx.frontend.node import CONVERTERS
from tvmx.frontend.rewrite import CLAIMED

# A body may hold further such operators (SoftmaxCrossEntropyLoss → NegativeLogLikelihoodLoss → …).
_ROUNDS = 5

# Expanded although there is a converter: the folder turns it into a Cast that saturates always.
_PREFER_BODY = {("", "CastLike")}


def expand_functions(model: ModelProto, name: str) -> ModelProto:
    """Inline the model's own functions and the schema-defined ones that no converter claims."""
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model, convert_version=True)
        except (RuntimeError, ValueError) as err:
            raise ModelError(f"{name}: its functions cannot be inlined: {err}") from err
    for _ in range(_ROUNDS):
        versions = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}
        if not any(_schema(n, versions) is not None for n in model.graph.node):
            return model
        expanded = _expand(model, versions)
        if expanded is None:
            return model
        model = expanded
    return model


def _schema(node: NodeProto, versions: dict[str, int]) -> defs.OpSchema | None:
    """Schema of a node that is to be replaced by its body, else None."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    key = (domain, node.op_type)
    if key not in _PREFER_BODY and (key in CONVERTERS or fallback.serves(*key)):
        return None
    if not domain and node.op_type in CLAIMED:
        return None  # a rewrite does better than the body (DynamicQuantizeLinear of zeros, GroupNormalization)
    try:
        schema = defs.get_schema(node.op_type, versions.get(domain, 1), domain)
    except defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _expand(model: ModelProto, versions: dict[str, int]) -> ModelProto | None:
    """One round; None when no body could be had (conversion then names the node)."""
    types = _types(model)
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    changed = False
    for k, node in enumerate(model.graph.node):
        schema = _schema(node, versions)
        body = _body(node, schema, types, versions.get("", 1)) if schema is not None else None
        if body is None:
            result.graph.node.append(node)
            continue
        changed = True
        result.graph.node.extend(_inline(node, body, f"{node.op_type}_{k}_{node.output[0]}"))
        for used in body.opset_import:
            if ("" if used.domain == "ai.onnx" else used.domain) not in versions:
                result.opset_import.append(used)
                versions[used.domain] = used.version
    return result if changed else None


def _types(model: ModelProto) -> dict[str, TypeProto]:
    try:
        inferred = shape_inference.infer_shapes(model, data_prop=True)
    except (shape_inference.InferenceError, ValueError, RuntimeError):
        inferred = model
    graph: GraphProto = inferred.graph
    types = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        kind = TypeProto()
        kind.tensor_type.elem_type = tensor.data_type
        for d in tensor.dims:
            kind.tensor_type.shape.dim.add().dim_value = d
        types[tensor.name] = kind
    return types


def _body(node: NodeProto, schema: defs.OpSchema, types: dict[str, TypeProto], opset: int) -> FunctionProto | None:
    """The function body of the newest version that the model's opset allows."""
    full = NodeProto()
    full.CopyFrom(node)
    given = {a.name for a in node.attribute}
    for key, attribute in schema.attributes.items():
        if key not in given and attribute.default_value.type != AttributeProto.UNDEFINED:
            full.attribute.append(attribute.default_value)
    text: bytes | None = None
    try:
        if schema.has_function:
            fits = [v for v in schema.function_opset_versions if v <= opset]
            text = schema.get_function_with_opset_version(max(fits)) if fits else None
        if text is None and schema.has_context_dependent_function:
            fits = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
            inputs = [types.get(i, TypeProto()).SerializeToString() for i in full.input]
            if fits:
                text = schema.get_context_dependent_function_with_opset_version(
                    max(fits), full.SerializeToString(), inputs
                )
    except (RuntimeError, ValueError, IndexError):
        return None
    if not text:
        return None
    body = FunctionProto()
    body.ParseFromString(text)
    del node.attribute[:]
    node.attribute.extend(full.attribute)
    return body


def _inline(node: NodeProto, body: FunctionProto, prefix: str) -> list[NodeProto]:
    """The body's nodes with actual inputs, outputs and attributes in place of the formal ones."""
    names = {formal: "" for formal in (*body.input, *body.output)}
    names.update(zip(body.input, node.input))
    names.update(zip(body.output, node.output))
    attributes = {a.name: a for a in node.attribute}

    def local(name: str) -> str:
        if not name:
            return ""
        if not names.get(name):
            if name in body.input:
                return ""
            names[name] = f"{prefix}_{name}"
        return names[name]

    def rename(original: NodeProto) -> NodeProto:
        copy = NodeProto()
        copy.CopyFrom(original)
        copy.name = f"{prefix}_{original.name or original.op_type}"
        copy.input[:] = [local(i) for i in original.input]
        copy.output[:] = [local(o) for o in original.output]
        del copy.attribute[:]
        for a in original.attribute:
            if a.ref_attr_name:
                actual = attributes.get(a.ref_attr_name)
                if actual is None:
                    continue
                a_copy = AttributeProto()
                a_copy.CopyFrom(actual)
                a_copy.name = a.name
            else:
                a_copy = AttributeProto()
                a_copy.CopyFrom(a)
                if a.type == AttributeProto.GRAPH:
                    inner = [rename(n) for n in a.g.node]
                    for value in (*a_copy.g.input, *a_copy.g.output, *a_copy.g.initializer):
                        value.name = local(value.name)
                    del a_copy.g.node[:]
                    a_copy.g.node.extend(inner)
            copy.attribute.append(a_copy)
        return copy

    return [rename(n) for n in body.node]
