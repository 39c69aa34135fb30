"""If, Loop and Scan without control flow: branches taken at compile time, iterations written out.

An If on a run-time condition computes both branches and selects, when both are cheap (at most
WHERE_NODES nodes, none of them in `HEAVY` or `UNSAFE`) and give equal static shapes. Any other one
is for `split_if`, which makes two programs of the model.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from tvmx.frontend.rewrite.context import Refuse, TensorType, subgraphs
from tvmx.frontend.rewrite.inline import Body
from tvmx.frontend.rewrite.rule import GIVE_SHAPES, Match, RewriteRule

WHERE_NODES = 32
WHERE_STEPS = 256
LOOP_STEPS = 4096

HEAVY = frozenset(
    "Conv ConvTranspose MatMul Gemm Einsum LSTM GRU RNN Loop Scan ConvInteger MatMulInteger QLinearConv "
    "QLinearMatMul Attention Resize TopK DFT STFT GridSample DeformConv".split()
)
# Must not run when their branch is not taken: output size from data, random state, integer division
# by what the condition guards.
UNSAFE = frozenset(
    "NonZero Compress Unique NonMaxSuppression Range RandomNormal RandomUniform RandomNormalLike "
    "RandomUniformLike Multinomial Bernoulli Div Mod SequenceAt SequenceErase".split()
)


def _flag(m: Match, index: int, what: str) -> bool | None:
    """A boolean input that is known; None when it is computed at run time."""
    value = m.const(index)
    if value is None:
        return None
    if value.size != 1:
        raise Refuse(f"{what} has {value.size} elements", "make it a scalar")
    return bool(value.reshape(()))


def rewrite_if(m: Match) -> list[str]:
    """The branch of a known condition, or Where(condition, then, else) of two cheap ones."""
    condition = _flag(m, 0, "the condition")
    branches = m.attr("then_branch"), m.attr("else_branch")
    if condition is not None:
        return Body.of_graph(m, branches[0 if condition else 1]).inline(())
    _require_cheap(m, branches)
    e = m.emit
    taken = [Body.of_graph(m, branch).inline((), side) for branch, side in zip(branches, ("then", "else"))]
    flag = m.input(0)
    if m.type(flag).shape != ():
        flag = e.reshape(flag, ())
    return [a if a == b else e.op("Where", flag, a, b) for a, b in zip(*taken)]


def _require_cheap(m: Match, branches: tuple[onnx.GraphProto, onnx.GraphProto]) -> None:
    advice = (
        f"bind the input that {m.input(0)!r} depends on with constants={{name: array}}, "
        "or compile the two programs of split_if"
    )
    for branch in branches:
        nodes = list(_all_nodes(branch))
        if len(nodes) > WHERE_NODES:
            raise Refuse(f"the condition is known at run time only and a branch has {len(nodes)} nodes", advice)
        for node in nodes:
            if node.op_type in HEAVY | UNSAFE:
                raise Refuse(
                    f"the condition is known at run time only and a branch holds {node.op_type}",
                    advice,
                )
    for output in m.node.output:
        known = m.graph.type(output) if output else None
        if output and (known is None or known.size is None):
            raise Refuse("the branches may give different shapes", advice)


def _all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    nodes = []
    for node in graph.node:
        if node.op_type not in ("Constant", "If"):
            nodes.append(node)
        for inner in subgraphs(node):
            nodes.extend(_all_nodes(inner))
    return nodes


def rewrite_loop(m: Match) -> list[str]:
    """Loop with a known trip count, or a condition that folds; iterations written out.

    A run-time condition with a known maximum becomes a mask on the carried values.
    """
    e = m.emit
    trips = m.need_const(0, "the trip count").reshape(-1) if m.input(0) else None
    limit = None if trips is None else max(int(trips[0]), 0)
    active: bool | str = True
    if m.input(1):
        known = _flag(m, 1, "the condition")
        active = m.input(1) if known is None else known
    state = list(m.node.input[2:])
    body = Body.of_graph(m, m.attr("body"))
    scans: list[list[str]] = [[] for _ in body.outputs[1 + len(state) :]]
    yes = e.const(True, "true")
    step = 0
    while active is not False and step != limit:
        if step == LOOP_STEPS:
            raise Refuse(f"the loop does not end within {LOOP_STEPS} iterations", "lower its trip count")
        flag, *outs = body.inline([e.const(step, "step", np.int64), yes, *state], f"step{step}")
        new, made = outs[: len(state)], outs[len(state) :]
        if isinstance(active, str):
            _require_masks(m, limit, scans)
            new = [_where(m, active, n, old) for n, old in zip(new, state)]
        state = new
        for parts, value in zip(scans, made):
            parts.append(value)
        step += 1
        active = _next(m, active, flag)
    stacked = [_stack(m, parts, 0, len(state) + k) for k, parts in enumerate(scans)]
    return [*state, *stacked]


def _next(m: Match, active: bool | str, flag: str) -> bool | str:
    value = m.graph.constant(flag)
    if value is not None:
        return active if bool(value.reshape(-1)[0]) else False
    scalar = m.emit.reshape(flag, ())
    return m.emit.op("And", active, scalar) if isinstance(active, str) else scalar


def _require_masks(m: Match, limit: int | None, scans: list[list[str]]) -> None:
    if limit is None or limit > WHERE_STEPS:
        raise Refuse(
            "it ends on a condition known at run time only",
            f"give it a constant trip count of at most {WHERE_STEPS}",
        )
    if scans:
        raise Refuse(
            "it ends on a run-time condition and collects one output per iteration",
            "export a loop with a constant trip count",
        )


def _where(m: Match, active: str, new: str, old: str) -> str:
    kinds = [m.graph.type(n) for n in (new, old)]
    if any(k is None or k.size is None for k in kinds) or kinds[0] != kinds[1]:
        raise Refuse("a carried value changes its shape under a run-time condition", GIVE_SHAPES)
    return m.emit.op("Where", m.emit.reshape(active, ()), new, old)


def _stack(m: Match, parts: list[str], axis: int, output: int) -> str:
    """One entry per iteration along a new axis."""
    if parts:
        return m.emit.concat([m.emit.unsqueeze(p, axis) for p in parts], axis)
    if not m.wants(output):
        return ""
    known = m.graph.type(m.node.output[output]) or TensorType(0, None)
    if known.shape is None or not all(isinstance(d, int) for d in known.shape[1:]):
        raise Refuse("it has no iteration, so the shape of its output is unknown", "remove the loop")
    shape = [0, *(int(d or 0) for d in known.shape[1:])]
    return m.emit.const(np.zeros(shape, helper.tensor_dtype_to_np_dtype(known.elem)), "empty")


def rewrite_scan(m: Match) -> list[str]:
    """Scan of opset 9: states and scan inputs, any axes and directions."""
    e = m.emit
    count = m.attr("num_scan_inputs")
    first = len(m.node.input) - count
    body = Body.of_graph(m, m.attr("body"))
    state = list(m.node.input[:first])
    axes = m.attr("scan_input_axes", [0] * count)
    backwards = m.attr("scan_input_directions", [0] * count)
    steps = m.dim(first, axes[0])
    scans: list[list[str]] = [[] for _ in body.outputs[first:]]
    for t in range(steps):
        entries = [
            e.select(m.input(first + k), axes[k] % m.rank(first + k), steps - 1 - t if backwards[k] else t)
            for k in range(count)
        ]
        outs = body.inline([*state, *entries], f"step{t}")
        state = outs[:first]
        for parts, value in zip(scans, outs[first:]):
            parts.append(value)
    out_axes = m.attr("scan_output_axes", [0] * len(scans))
    out_backwards = m.attr("scan_output_directions", [0] * len(scans))
    stacked = [
        _stack(m, parts[::-1] if back else parts, _axis(m, axis, parts), first + k)
        for k, (parts, axis, back) in enumerate(zip(scans, out_axes, out_backwards))
    ]
    return [*state, *stacked]


def _axis(m: Match, axis: int, parts: list[str]) -> int:
    if axis >= 0 or not parts:
        return max(axis, 0)
    return axis + len(m.type(parts[0]).shape or ()) + 1


def rewrite_scan_8(m: Match) -> list[str]:
    """Scan of opset 8: one independent scan per batch entry, all equally long."""
    e = m.emit
    if m.input(0):
        raise Refuse("sequence lengths in Scan of opset 8", "convert the model to opset 9 or later")
    count = m.attr("num_scan_inputs")
    states = len(m.node.input) - 1 - count
    backwards = m.attr("directions", [0] * count)
    body = Body.of_graph(m, m.attr("body"))
    batch, steps = m.dim(1 + states, 0), m.dim(1 + states, 1)
    results: list[list[str]] = [[] for _ in body.outputs]
    for b in range(batch):
        state = [e.select(m.input(1 + k), 0, b) for k in range(states)]
        scans: list[list[str]] = [[] for _ in body.outputs[states:]]
        for t in range(steps):
            entries = [
                e.select(e.select(m.input(1 + states + k), 0, b), 0, steps - 1 - t if back else t)
                for k, back in enumerate(backwards)
            ]
            outs = body.inline([*state, *entries], f"batch{b}/step{t}")
            state = outs[:states]
            for parts, value in zip(scans, outs[states:]):
                parts.append(value)
        for parts, value in zip(results, [*state, *(_stack(m, s, 0, 0) for s in scans)]):
            parts.append(value)
    return [_stack(m, parts, 0, k) for k, parts in enumerate(results)]


def scan(m: Match) -> list[str]:
    """Scan of either form."""
    return rewrite_scan_8(m) if m.graph.opset < 9 else rewrite_scan(m)


RULES = (
    RewriteRule("inline_If", ("If",), rewrite_if),
    RewriteRule("unroll_Loop", ("Loop",), rewrite_loop),
    RewriteRule("unroll_Scan", ("Scan",), scan),
)
