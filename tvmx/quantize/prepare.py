"""The ONNX model as quantisation wants it: constants folded, BatchNorm in the weights, opset 13 or later."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, version_converter

from tvmx.config import Shapes
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import affine, apply_rules, hygiene
from tvmx.frontend.rewrite.rule import Match, RewriteRule

log = logging.getLogger(__name__)

# DequantizeLinear takes one scale per channel from opset 13 on; LayerNormalization and HardSwish exist at 17.
MIN_OPSET = 13
RAISED_OPSET = 17


def prepare_model(
    model: str | Path | bytes | ModelProto,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> tuple[ModelProto, str]:
    """Load, check, bind constants, fix shapes, fold, fold BatchNorm; returns the model and its name.

    Names of inputs and outputs survive, every node gets a name. The result is standard ONNX. Raises ModelError.
    """
    from tvmx.frontend.importer import prepare

    prepared = prepare(model, shapes, constants)
    proto = _raise_opset(prepared.proto, prepared.name)
    proto, report = apply_rules(proto, (*RULES, *affine.RULES, *hygiene.RULES), tolerate=None)
    hygiene.merge_initializers(proto)
    log.info("%s: prepared for quantisation: %s", prepared.name, report)
    _name_nodes(proto)
    del proto.graph.value_info[:]
    return proto, prepared.name


def _raise_opset(proto: ModelProto, name: str) -> ModelProto:
    version = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
    if version >= MIN_OPSET:
        return proto
    try:
        return version_converter.convert_version(proto, RAISED_OPSET)
    except (RuntimeError, ValueError) as err:
        raise ModelError(
            f"{name}: quantising needs opset {MIN_OPSET} or later; the model has {version} and cannot be converted "
            f"({str(err).splitlines()[0]}); export it with opset_version={RAISED_OPSET}"
        ) from None


def _name_nodes(proto: ModelProto) -> None:
    used = {n.name for n in proto.graph.node if n.name}
    seen: set[str] = set()
    for node in proto.graph.node:
        name = node.name or next((o for o in node.output if o), node.op_type)
        if name in seen or not node.name:
            base, k = name, 1
            while name in used or name in seen:
                k += 1
                name = f"{base}_{k}"
            node.name = name
        seen.add(name)


def _scalar(m: Match, node: NodeProto, index: int) -> float | None:
    if index >= len(node.input) or not node.input[index]:
        return None
    value = m.graph.constant(node.input[index])
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


def _split_constant(m: Match, node: NodeProto) -> tuple[str, float] | None:
    """A two-operand node as (the computed operand, the constant one)."""
    for x, c in ((0, 1), (1, 0)):
        value = _scalar(m, node, c)
        if value is not None:
            return node.input[x], value
    return None


def _gate_of(m: Match, gate: str) -> str | None:
    """The x of clip(x + 3, 0, 6), or of HardSigmoid(alpha=1/6, beta=1/2), whatever its outer factor."""
    maker = m.graph.producers.get(gate)
    if maker is None:
        return None
    if maker.op_type == "HardSigmoid":
        inner = Match(maker, m.graph)
        good = abs(inner.attr("alpha", 0.2) - 1 / 6) < 1e-4 and abs(inner.attr("beta", 0.5) - 0.5) < 1e-6
        return str(maker.input[0]) if good else None
    if maker.op_type != "Clip" or _scalar(m, maker, 1) != 0 or _scalar(m, maker, 2) != 6:
        return None
    add = m.graph.producers.get(maker.input[0])
    found = _split_constant(m, add) if add is not None and add.op_type == "Add" else None
    return found[0] if found is not None and found[1] == 3 else None


def _hard_swish_input(m: Match) -> str | None:
    """x where the node computes x * clip(x + 3, 0, 6) / 6, written in any of the usual orders."""
    node = m.node
    if node.op_type == "Mul":
        for x, gate in ((0, 1), (1, 0)):
            maker = m.graph.producers.get(node.input[gate])
            # x * HardSigmoid(x), or x * (clip(x + 3) / 6)
            if maker is not None and maker.op_type == "HardSigmoid" and _gate_of(m, node.input[gate]) == node.input[x]:
                return str(node.input[x])
            if maker is not None and maker.op_type in ("Div", "Mul") and _is_sixth(m, maker):
                found = _split_constant(m, maker)
                if found is not None and _gate_of(m, found[0]) == node.input[x]:
                    return str(node.input[x])
    if not _is_sixth(m, node):
        return None
    found = _split_constant(m, node)  # (x * clip(x + 3, 0, 6)) / 6
    product = m.graph.producers.get(found[0]) if found is not None else None
    if product is None or product.op_type != "Mul":
        return None
    for x, gate in ((0, 1), (1, 0)):
        maker = m.graph.producers.get(product.input[gate])
        clipped = maker is not None and maker.op_type == "Clip"
        if clipped and _gate_of(m, product.input[gate]) == product.input[x]:
            return str(product.input[x])
    return None


def _is_sixth(m: Match, node: NodeProto) -> bool:
    if node.op_type == "Div":
        return _scalar(m, node, 1) == 6
    found = _split_constant(m, node) if node.op_type == "Mul" else None
    return found is not None and abs(found[1] - 1 / 6) < 1e-4


def _reject_hard_swish(m: Match) -> str | None:
    if m.graph.opset < 14:
        return "opset 14 brought HardSwish"
    known = m.graph.type(m.node.output[0])
    if known is None or known.elem != onnx.TensorProto.FLOAT:
        return "it is not float32"
    return None if _hard_swish_input(m) is not None else "it is no hard swish"


def _hard_swish(m: Match) -> list[str]:
    x = _hard_swish_input(m)
    assert x is not None
    return [m.emit.op("HardSwish", x)]


# One node instead of four, so that an activation function is seen as one.
RULES = (RewriteRule("join_HardSwish", ("Mul", "Div"), _hard_swish, _reject_hard_swish, required=False),)
