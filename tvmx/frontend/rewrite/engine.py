"""Apply a table of rules until nothing changes, and put the model together again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import helper, inliner, numpy_helper

from tvmx.errors import ModelError
from tvmx.frontend.rewrite.context import (
    GraphContext,
    Refuse,
    rename_uses,
    subgraphs,
    used_names,
)
from tvmx.frontend.rewrite.infer import infer_types
from tvmx.frontend.rewrite.rule import Match, RewriteRule, op_key

log = logging.getLogger(__name__)

_FOLD_LIMIT = 1024  # elements: shapes and indices fold here, weights are left to the caller
_MAX_PASSES = 100


@dataclass(frozen=True)
class Report:
    """How often each rule fired, and why others did not."""

    counts: dict[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name}: {n}" for name, n in sorted(self.counts.items())) or "nothing"


def _all_names(graph: onnx.GraphProto) -> Iterable[str]:
    for group in (graph.input, graph.output, graph.initializer, graph.value_info):
        yield from (item.name for item in group)
    for node in graph.node:
        yield from node.output
        yield from node.input
        for inner in subgraphs(node):
            yield from _all_names(inner)


class _Rewriter:
    def __init__(self, model: onnx.ModelProto, rules: Sequence[RewriteRule]) -> None:
        if model.functions:
            model = inliner.inline_local_functions(model)
        graph = model.graph
        if graph.sparse_initializer:
            raise ModelError(f"graph {graph.name!r} has sparse initializers; store them as dense tensors")
        self.model = model
        self.inputs = list(graph.input)
        self.nodes = []
        for node in graph.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            self.nodes.append(copy)
        self.graph = GraphContext(
            opsets={("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import},
            outputs=frozenset(o.name for o in graph.output),
            names=set(_all_names(graph)),
            constants={i.name: i for i in graph.initializer},
        )
        self.table: dict[str, list[RewriteRule]] = {}
        for rule in rules:
            for op in rule.ops:
                self.table.setdefault(op, []).append(rule)
        self.counts: Counter[str] = Counter()

    def run(self) -> dict[str, tuple[onnx.NodeProto, RewriteRule, Refuse]]:
        """Rewrite to the fixed point; returns the nodes that still refuse, by first output."""
        for _ in range(_MAX_PASSES):
            changed, pending = self._one_pass()
            if not changed:
                return pending
        raise ModelError(
            f"rewriting did not settle after {_MAX_PASSES} passes; last applied: {Report(dict(self.counts))}"
        )

    def _one_pass(self) -> tuple[bool, dict[str, tuple[onnx.NodeProto, RewriteRule, Refuse]]]:
        graph = self.graph
        graph.types = infer_types(self.nodes, self.inputs, graph.constants, graph.opsets, self.model.ir_version)
        graph.uses = Counter(name for node in self.nodes for name in used_names(node))
        graph.producers = {o: node for node in self.nodes for o in node.output if o}
        graph.node_count = len(self.nodes)
        pending: dict[str, tuple[onnx.NodeProto, RewriteRule, Refuse]] = {}
        changed = False
        out: list[onnx.NodeProto] = []
        alias: dict[str, str] = {}
        for node in self.nodes:
            if alias:
                rename_uses(node, alias)
            if self._fold(node):
                changed = True
                continue
            new = self._apply(node, alias, pending)
            changed |= new is not None
            out.extend([node] if new is None else new)
        self.nodes = self._live(out)
        return changed, pending

    def _fold(self, node: onnx.NodeProto) -> bool:
        try:
            known = self.graph.type(node.output[0]) if node.output else None
            growing = known is None or known.size is None
            values = self.graph.fold(node, 64 if growing else _FOLD_LIMIT)
        except Refuse:
            return False
        if values is None:
            return False
        for name, value in zip(node.output, values):
            if name:
                self.graph.set_constant(name, value)
        self.counts["fold"] += 1
        return True

    def _apply(
        self,
        node: onnx.NodeProto,
        alias: dict[str, str],
        pending: dict[str, tuple[onnx.NodeProto, RewriteRule, Refuse]],
    ) -> list[onnx.NodeProto] | None:
        for rule in self.table.get(op_key(node), ()):
            match = Match(node, self.graph)
            try:
                reason = rule.reject(match)
                if reason is not None:
                    log.debug("%s refused for node %r: %s", rule.name, node.name, reason)
                    continue
                results = rule.rewrite(match)
            except Refuse as refusal:
                log.debug("%s refused for node %r: %s", rule.name, node.name, refusal.reason)
                if rule.required:
                    pending[next(o for o in node.output if o)] = (node, rule, refusal)
                continue
            self.counts[rule.name] += 1
            return self._replace(node, list(results), match.emit.nodes, alias)
        return None

    def _replace(
        self,
        node: onnx.NodeProto,
        results: list[str],
        nodes: list[onnx.NodeProto],
        alias: dict[str, str],
    ) -> list[onnx.NodeProto]:
        """Give the new values the old names where a graph output needs it, else redirect."""
        made = {o for n in nodes for o in n.output if o}
        renamed: dict[str, str] = {}
        for old, new in zip(node.output, results):
            if not old or old == new:
                continue
            if new in made and new not in renamed:
                renamed[new] = old
            elif old in self.graph.outputs:
                source = renamed.get(new, new)
                nodes.append(helper.make_node("Identity", [source], [old], old))
            else:
                alias[old] = renamed.get(new, new)
        for item in nodes:
            rename_uses(item, renamed)
            for k, name in enumerate(item.output):
                item.output[k] = renamed.get(name, name)
        self.graph.producers.update((o, n) for n in nodes for o in n.output if o)
        for kept in nodes:
            self.graph.uses.update(used_names(kept))
        return nodes

    def _live(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        live = set(self.graph.outputs)
        kept = []
        for node in reversed(nodes):
            if any(o in live for o in node.output if o):
                live.update(used_names(node))
                kept.append(node)
        self.graph.constants = {k: v for k, v in self.graph.constants.items() if k in live}
        return kept[::-1]

    def result(self) -> onnx.ModelProto:
        """The rewritten model; the one given is not touched."""
        model = onnx.ModelProto()
        model.CopyFrom(_without_graph(self.model))
        graph = model.graph
        graph.name = self.model.graph.name
        graph.doc_string = self.model.graph.doc_string
        graph.input.extend(self.inputs)
        graph.output.extend(self.model.graph.output)
        graph.node.extend(self.nodes)
        for name, value in self.graph.constants.items():
            if isinstance(value, onnx.TensorProto):
                graph.initializer.append(value)
            else:
                graph.initializer.append(numpy_helper.from_array(value, name))
        model.ir_version = max(model.ir_version, 4)
        return model


def _without_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    shell = onnx.ModelProto()
    for name in ("ir_version", "producer_name", "producer_version", "domain", "model_version"):
        setattr(shell, name, getattr(model, name))
    shell.doc_string = model.doc_string
    shell.opset_import.extend(model.opset_import)
    shell.metadata_props.extend(model.metadata_props)
    return shell


def refusal_error(node: onnx.NodeProto, refusal: Refuse) -> ModelError:
    """The error a user sees for a node that had to be rewritten and could not be."""
    name = node.name or next((o for o in node.output if o), "")
    advice = f"; {refusal.advice}" if refusal.advice else ""
    return ModelError(f"node {name!r} ({op_key(node)}): {refusal.reason}{advice}")


def apply_rules(
    model: onnx.ModelProto,
    rules: Sequence[RewriteRule],
    tolerate: frozenset[str] | None = frozenset(),
) -> tuple[onnx.ModelProto, Report]:
    """Apply `rules` to the main graph until nothing changes.

    Small constants (shapes, axes, indices) fold on the way. Names of inputs and outputs survive.
    Raises ModelError for a node of a required rule that refuses, unless its operator is in
    `tolerate` (None: any).
    """
    rewriter = _Rewriter(model, rules)
    pending = rewriter.run()
    for node, _, refusal in pending.values():
        if tolerate is not None and op_key(node) not in tolerate:
            raise refusal_error(node, refusal)
    refused = tuple(f"{op_key(n)}: {r.reason}" for n, _, r in pending.values())
    report = Report(dict(rewriter.counts), refused)
    log.info("rewrites: %s", report)
    return rewriter.result(), report
