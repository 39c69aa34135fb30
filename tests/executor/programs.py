"""Small Relax programs for the tests of graph, executor and runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvmx.executor import BuildResult, EntryProgram, build_artifact
from tvmx.graph import Graph, from_relax
from tvmx.schedule import apply_default
from tvmx.target import Target, resolve


@dataclass(frozen=True)
class FakeModel:
    """What the executor reads of an imported model."""

    name: str = "test"
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    bounds: dict[str, Any] = field(default_factory=dict)
    checks: tuple[Any, ...] = ()


def lowered(inputs: Sequence[tuple[str, Sequence[Any], str]], body: Callable[..., Any], passes: bool = True) -> Any:
    """A Relax module with `main(inputs) = body(*inputs)`, lowered and fused by TVM's own passes.

    A string in a shape is a symbolic dim; equal strings are one dim.
    """
    import tvm
    from tvm import relax

    dims: dict[str, Any] = {}

    def dim(d: Any) -> Any:
        return dims.setdefault(d, tvm.tirx.Var(d, "int64")) if isinstance(d, str) else d

    params = [relax.Var(n, relax.TensorType(tuple(map(dim, s)), t)) for n, s, t in inputs]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = body(builder, *params)
            result = builder.emit_output(relax.Tuple(list(result)) if isinstance(result, (list, tuple)) else result)
        builder.emit_func_output(result)
    mod = builder.get()
    if not passes:
        return mod
    t = relax.transform
    return tvm.ir.transform.Sequential(
        [
            t.LegalizeOps(), t.RewriteDataflowReshape(), t.AnnotateTIROpPattern(), t.FoldConstant(),
            t.FuseOps(), t.FuseTIR(), t.DeadCodeElimination(),
        ]
    )(mod)  # fmt: skip


def graph_of(mod: Any, outputs: Sequence[str]) -> Graph:
    return from_relax(mod, [p.name for p in mod["main"].params], outputs)


def build(
    mod: Any,
    outputs: Sequence[str],
    path: Path,
    target: Target | None = None,
    scheduled: bool = False,
    model: FakeModel | None = None,
    entry: str = "main",
) -> BuildResult:
    """Build one entry, with the default schedules when `scheduled`."""
    target = target or resolve("native", 2)
    program = entry_program(mod, outputs, target, scheduled, model, entry)
    return build_artifact([program], target, path)


def entry_program(
    mod: Any,
    outputs: Sequence[str],
    target: Target,
    scheduled: bool = False,
    model: FakeModel | None = None,
    entry: str = "main",
) -> EntryProgram:
    import tvm

    graph = graph_of(mod, outputs)
    rules: dict[str, str] = {}
    if scheduled:
        done = {}
        for var, func in mod.functions.items():
            if isinstance(func, tvm.tirx.PrimFunc):
                result = apply_default(func, target)
                done[var.name_hint], rules[var.name_hint] = result.func, result.rule
        mod = tvm.IRModule({**done})
    return EntryProgram(entry, model or FakeModel(), graph, mod, rules)
