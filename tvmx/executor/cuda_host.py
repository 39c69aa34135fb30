"""Graph + stream plan + launches → the C tables that `cuda.c` runs: nothing is looked up while running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmx.cuda.lower import Argument, DeviceProgram
from tvmx.errors import CompileError
from tvmx.executor.lifetimes import tensor_bytes
from tvmx.executor.streams import StreamPlan
from tvmx.graph import COPY, Graph, Node

MAX_ARGUMENTS = 64  # STACK_ARGUMENTS of cuda.c

PRELUDE = """\
#include "cuda_tables.h"
#include "tvmx_cuda.h"

#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN int tvmx_cuda_run(tvmx_cuda*, const tvmx_cuda_call*, const tvmx_program*);
"""

_SPACES = {"input": "TVMX_INPUT", "output": "TVMX_OUTPUT", "intermediate": "TVMX_ARENA", "constant": "TVMX_PARAMETER"}


@dataclass(frozen=True)
class KernelEntry:
    """A kernel of the library: where its images begin, its shared memory, dynamic and in all."""

    name: str
    cubin: int
    ptx: int
    shared: int
    total: int


def workspace_name(node: Node, index: int) -> str:
    """The arena buffer of a kernel's own workspace; `index` < 0 as in `tvmx.cuda.lower.Argument`."""
    return f"{node.name}.workspace{-1 - index}"


def workspaces(node: Node, program: DeviceProgram) -> dict[str, int]:
    """Name → bytes of the workspaces that a call needs."""
    from math import prod

    from tvmx.executor.lifetimes import dtype_bytes

    found: dict[str, int] = {}
    for launch in program.launches:
        for a in launch.arguments:
            if a.index < 0:
                found[workspace_name(node, a.index)] = prod(a.shape) * dtype_bytes(a.dtype)
    return found


def is_empty(graph: Graph, node: Node) -> bool:
    """Whether a call computes nothing, as an output has no elements."""
    return all(tensor_bytes(graph.tensors[o]) == 0 for o in node.outputs)


def entry_tables(
    graph: Graph,
    entry: str,
    programs: Mapping[str, DeviceProgram],
    kernels: Mapping[str, int],
    streams: StreamPlan,
    arena_offsets: Mapping[str, int],
    constant_offsets: Mapping[str, int],
) -> str:
    """C source of `tvmx_cuda_run_<entry>`.

    `programs` maps a kernel of the graph to its launches, `kernels` a launch's kernel to its place in the library;
    tasks of `streams` are the graph's nodes. Raises CompileError for a kernel with too many arguments.
    """
    table = _Tables(graph, programs, kernels, arena_offsets, constant_offsets)
    steps = []
    for step in streams.steps:
        if step.what == "launch":
            node = graph.nodes[step.index]
            steps += [f"{{{kind}, {step.stream}, {at}, {step.index}}}" for kind, at in table.node(node)]
        else:
            steps.append(f"{{TVMX_{step.what.upper()}, {step.stream}, {step.index}, -1}}")
    return "\n".join(
        [
            _array("tvmx_step", f"steps_{entry}", steps),
            _array("tvmx_place", f"places_{entry}", table.places),
            _array("tvmx_launch", f"launches_{entry}", table.launches),
            _array("tvmx_copy", f"copies_{entry}", table.copies),
            f"static const tvmx_program program_{entry} = {{steps_{entry}, launches_{entry}, copies_{entry}, "
            f"places_{entry}, {len(steps)}, {streams.streams}, {streams.events}, {len(graph.nodes)}}};",
            f"EXPORT int tvmx_cuda_run_{entry}(tvmx_cuda* handle, const tvmx_cuda_call* call) {{",
            f"  return tvmx_cuda_run(handle, call, &program_{entry});",
            "}",
            "",
        ]
    )


def code_table(
    kernels: Sequence[KernelEntry], sm: int, exact: bool, plans: Sequence[StreamPlan], parameter_bytes: int, target: str
) -> str:
    """C source of `tvmx_code`: what is loaded when the model is opened."""
    rows = [f'{{"{k.name}", {k.cubin}, {k.ptx}, {k.shared}, {k.total}}}' for k in kernels]
    streams = max((p.streams for p in plans), default=1)
    events = max((p.events for p in plans), default=0)
    return "\n".join(
        [
            _array("tvmx_kernel", "kernels", rows),
            "extern HIDDEN const tvmx_device_code tvmx_code;",
            f"const tvmx_device_code tvmx_code = {{kernels, {len(rows)}, {sm}, {int(exact)}, {streams}, {events}, "
            f'{MAX_ARGUMENTS}, {parameter_bytes}, "{target}"}};',
            "",
        ]
    )


def _array(kind: str, name: str, rows: Sequence[str]) -> str:
    body = ",\n  ".join(rows)
    return f"static const {kind} {name}[] = {{\n  {body}\n}};" if rows else f"static const {kind} {name}[1];"


class _Tables:
    def __init__(
        self, graph: Graph, programs: Mapping[str, DeviceProgram], kernels: Mapping[str, int],
        arena: Mapping[str, int], constants: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._graph, self._programs, self._kernels = graph, programs, kernels
        self._arena, self._constants = arena, constants
        self.places: list[str] = []
        self.launches: list[str] = []
        self.copies: list[str] = []

    def node(self, node: Node) -> list[tuple[str, int]]:
        """The steps of a node: what, and its place in the table of that kind."""
        if is_empty(self._graph, node):
            return []
        if node.kernel == COPY:
            size = tensor_bytes(self._graph.tensors[node.outputs[0]])
            to, source = self._place(node.outputs[0]), self._place(node.inputs[0])
            self.copies.append(f"{{{to}, {source}, {size}}}")
            return [("TVMX_COPY", len(self.copies) - 1)]
        return [("TVMX_LAUNCH", self._launch(node, l)) for l in self._programs[node.kernel].launches]

    def _launch(self, node: Node, launch: Any) -> int:
        if len(launch.arguments) > MAX_ARGUMENTS:
            raise CompileError(
                f"{node.name}: kernel {launch.kernel} takes {len(launch.arguments)} tensors, at most {MAX_ARGUMENTS} "
                "are possible; split the operator"
            )
        first = len(self.places)
        self.places += [self._argument(node, a) for a in launch.arguments]
        grid, block = (f"{{{', '.join(map(str, e))}}}" for e in (launch.grid, launch.block))
        self.launches.append(
            f"{{{self._kernels[launch.kernel]}, {grid}, {block}, {launch.shared_bytes}, {first}, "
            f"{len(launch.arguments)}}}"
        )
        return len(self.launches) - 1

    def _argument(self, node: Node, argument: Argument) -> str:
        if argument.index < 0:
            return f"{{TVMX_ARENA, 0, {self._arena[workspace_name(node, argument.index)]}}}"
        return self._place((*node.inputs, *node.outputs)[argument.index])

    def _place(self, name: str) -> str:
        owner = self._graph.storage(name)
        kind = self._graph.tensors[owner].kind
        inside = self._graph.offset(name)
        assert isinstance(inside, int), "symbolic shapes are refused"
        index = offset = 0
        if kind == "input":
            index = self._graph.inputs.index(owner)
        elif kind == "output":
            index = self._graph.outputs.index(owner)
        elif kind == "constant":
            offset = self._constants[owner]
        else:
            offset = self._arena[owner]
        return f"{{{_SPACES[kind]}, {index}, {offset + inside}}}"
