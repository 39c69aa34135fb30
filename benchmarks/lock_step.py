"""A model with run-time quantisers, cut at them: what the operators between compute from equal codes.

`DynamicQuantizeLinear` rounds, so that a last bit of a float decides a whole step of a code where it lies at a tie, and
every layer after it multiplies the difference: ONNX Runtime differs from itself by up to 5 % of the range once its own
optimisations are off. Compared end to end, such a model says nothing. Cut at the quantisers, whose outputs become
inputs with the reference's values, every operator must agree as a float model's does; and so must the quantisers by
themselves, bit for bit, on the reference's floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.models import Inputs

QUANTISER = "DynamicQuantizeLinear"


@dataclass(frozen=True)
class Cut:
    """A model that is part of another, what to feed it, and what it must give."""

    proto: Any  # onnx.ModelProto
    inputs: Inputs
    expected: Inputs


def run_plain(proto: Any, inputs: Inputs) -> Inputs:
    """ONNX Runtime without optimisations: every operator as it is written."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def cut(proto: Any, inputs: Inputs) -> tuple[Cut, Cut]:
    """(the operators between the quantisers, the quantisers), with the reference's values at the cuts."""
    quantisers = [n for n in proto.graph.node if n.op_type == QUANTISER]
    codes = [o for n in quantisers for o in n.output if o]
    given = {i.name for i in proto.graph.input}
    floats = [f for f in dict.fromkeys(n.input[0] for n in quantisers) if f not in given]
    outputs = [o.name for o in proto.graph.output]
    kinds = {o: dtype for n in quantisers for o, dtype in zip(n.output, (np.uint8, np.float32, np.uint8))}
    shown = _part(proto, proto.graph.node, inputs, [*dict.fromkeys([*outputs, *floats, *codes])], kinds=kinds)
    values = {**inputs, **run_plain(shown, inputs)}

    between = {**inputs, **{c: values[c] for c in codes}}
    wanted = list(dict.fromkeys([*outputs, *floats]))
    nodes = [n for n in proto.graph.node if n.op_type != QUANTISER]
    rest = _part(proto, nodes, between, wanted, values)
    own = {f: values[f] for f in dict.fromkeys(n.input[0] for n in quantisers)}
    alone = _part(proto, quantisers, own, codes, values, weights=False)
    return (
        Cut(rest, between, run_plain(rest, between)),
        Cut(alone, own, {c: values[c] for c in codes}),
    )


def _part(
    proto: Any,
    nodes: Any,
    inputs: Inputs,
    outputs: list[str],
    values: Inputs | None = None,
    weights: bool = True,
    kinds: dict[str, Any] | None = None,
) -> Any:
    """`nodes` as a model of their own; outputs take shape and dtype from `values`, else dtype from `kinds` or float."""
    from onnx import helper

    def info(name: str, array: np.ndarray | None) -> Any:
        dtype = np.dtype((kinds or {}).get(name, np.float32)) if array is None else array.dtype
        shape = None if array is None else array.shape
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)

    known = {o.name: o for o in proto.graph.output}
    values = values or {}
    graph = helper.make_graph(
        nodes,
        "part",
        [info(name, array) for name, array in inputs.items()],
        [known[o] if o in known else info(o, values.get(o)) for o in outputs],
        proto.graph.initializer if weights else [],
    )
    return helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
