"""A model with an If on a run-time condition, as two programs and the program that chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvmx.frontend.rewrite.context import rename_uses, used_names
from tvmx.frontend.rewrite.engine import apply_rules
from tvmx.frontend.rewrite.rule import RewriteRule


@dataclass(frozen=True)
class SplitIf:
    """`condition` has one output, a bool of one element, and those inputs of the model it reads.

    `then` and `otherwise` have the model's own inputs and outputs; run the one that it says.
    Each may be split again.
    """

    node: str
    condition: onnx.ModelProto
    then: onnx.ModelProto
    otherwise: onnx.ModelProto


def split_if(model: onnx.ModelProto, rules: Sequence[RewriteRule]) -> SplitIf | None:
    """Split at the first If that rewriting leaves; None when rewriting leaves none."""
    prepared, _ = apply_rules(model, rules, tolerate=None)
    found = next((n for n in prepared.graph.node if n.op_type == "If"), None)
    if found is None:
        return None
    condition = found.input[0]
    programs = [apply_rules(_assume(prepared, condition, value), rules, tolerate=None)[0] for value in (True, False)]
    return SplitIf(found.name, _condition_program(prepared, condition, found), *programs)


def _assume(model: onnx.ModelProto, name: str, value: bool) -> onnx.ModelProto:
    """The model in which every reader of `name` reads a constant."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = _unused(model, f"{name}/known")
    copy.graph.initializer.append(numpy_helper.from_array(np.asarray(value), known))
    for node in copy.graph.node:
        rename_uses(node, {name: known})
    return copy


def _condition_program(model: onnx.ModelProto, name: str, found: onnx.NodeProto) -> onnx.ModelProto:
    program = onnx.ModelProto()
    program.CopyFrom(model)
    graph = program.graph
    output = _unused(model, "condition")
    shape = _unused(model, "condition/shape")
    del graph.output[:], graph.node[:]
    graph.output.append(helper.make_tensor_value_info(output, TensorProto.BOOL, []))
    needed, kept = {name}, []
    for node in reversed(model.graph.node):
        if node is not found and needed.intersection(node.output):
            needed.update(used_names(node))
            kept.append(node)
    graph.node.extend(kept[::-1])
    graph.initializer.append(numpy_helper.from_array(np.zeros(0, np.int64), shape))
    graph.node.append(helper.make_node("Reshape", [name, shape], [output], output))
    needed.add(shape)
    for group in (graph.input, graph.initializer):
        used = [item for item in group if item.name in needed]
        del group[:]
        group.extend(used)
    return program


def _unused(model: onnx.ModelProto, name: str) -> str:
    graph = model.graph
    taken = {o for n in graph.node for o in n.output}
    taken.update(item.name for group in (graph.input, graph.initializer) for item in group)
    while name in taken:
        name += "_"
    return name
