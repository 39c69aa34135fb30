"""Graph + launches → tasks with estimated times, their stream plan, and the arena that fits it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tvmx.cuda.lower import DeviceProgram, Launch
from tvmx.cuda.nvcc import Resources
from tvmx.cuda.sass import resident_blocks
from tvmx.cuda.survey import MATRIX_RULES
from tvmx.executor.cuda_host import is_empty, workspaces
from tvmx.executor.lifetimes import tensor_bytes
from tvmx.executor.order import dependencies
from tvmx.executor.stream_check import check_plan
from tvmx.executor.stream_memory import Use, plan_arena, regions_of
from tvmx.executor.streams import StreamPlan, Task, plan_streams
from tvmx.graph import COPY, Graph, Node
from tvmx.memory import Solution
from tvmx.target import Gpu

LAUNCH_S = 2e-6  # from one kernel's end to the next one's begin, and its own ramp
_REACHED = 0.6  # share of a peak rate that a kernel is taken to reach
_SIMT_MACS = 64  # float32 multiply-adds a cycle of one multiprocessor outside Tensor Cores


@dataclass(frozen=True)
class Scheduled:
    """A graph in the order of issue, and everything that follows from it; tasks are its nodes."""

    graph: Graph
    tasks: tuple[Task, ...]
    streams: StreamPlan
    uses: tuple[Use, ...]
    arena: Solution


def schedule(
    graph: Graph,
    programs: Mapping[str, DeviceProgram],
    resources: Mapping[str, Resources],
    rules: Mapping[str, str],
    gpu: Gpu,
    max_streams: int,
    planner: str = "best",
    budget_s: float = 2.0,
) -> Scheduled:
    """Plan streams and memory; the plan is checked by code that shares nothing with the planners.

    `programs` and `rules` are by kernel of the graph, `resources` by kernel of the device.
    """
    estimate = _Estimate(graph, programs, resources, rules, gpu)
    tasks = _tasks(graph, estimate)
    first = plan_streams(tasks, max_streams)
    order = first.order
    place = {old: new for new, old in enumerate(order)}
    graph = dataclasses.replace(graph, nodes=tuple(graph.nodes[i] for i in order))
    tasks = [dataclasses.replace(tasks[i], after=tuple(sorted(place[a] for a in tasks[i].after))) for i in order]
    steps = tuple(dataclasses.replace(s, index=place[s.index]) if s.what == "launch" else s for s in first.steps)
    streams = dataclasses.replace(first, steps=steps)
    uses = arena_uses(graph, programs)
    arena = plan_arena(uses, streams, budget_s, planner)
    check_plan(tasks, streams, regions_of(uses, arena.offsets))
    return Scheduled(graph, tuple(tasks), streams, tuple(uses), arena)


def arena_uses(graph: Graph, programs: Mapping[str, DeviceProgram]) -> list[Use]:
    """Intermediates that own storage, with who writes and reads them, and the kernels' workspaces."""
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    spaces = []
    for index, node in enumerate(graph.nodes):
        for name in node.inputs:
            readers.setdefault(graph.storage(name), []).append(index)
        for name in node.outputs:
            writers.setdefault(graph.storage(name), []).append(index)
        if node.kernel != COPY and not is_empty(graph, node):
            spaces += [Use(n, size, (index,)) for n, size in workspaces(node, programs[node.kernel]).items()]
    uses = []
    for name, written in writers.items():
        if graph.tensors[name].kind == "intermediate":
            size = tensor_bytes(graph.tensors[name])
            assert isinstance(size, int)
            uses.append(Use(name, size, _distinct(written), _distinct(readers.get(name, ()))))
    return uses + spaces


def _distinct(tasks: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(tasks))


def _tasks(graph: Graph, estimate: _Estimate) -> list[Task]:
    return [
        Task(node.op or node.kernel, *estimate(node), after) for node, after in zip(graph.nodes, dependencies(graph))
    ]


class _Estimate:
    """Seconds that a node takes alone, and the share of the device that it fills, from data sheets."""

    def __init__(
        self, graph: Graph, programs: Mapping[str, DeviceProgram], resources: Mapping[str, Resources],
        rules: Mapping[str, str], gpu: Gpu,
    ) -> None:  # fmt: skip
        self._graph, self._programs, self._resources, self._rules, self._gpu = graph, programs, resources, rules, gpu

    def __call__(self, node: Node) -> tuple[float, float]:
        gpu = self._gpu
        names = dict.fromkeys((*node.inputs, *node.outputs))
        moved = sum(s for s in (tensor_bytes(self._graph.tensors[n]) for n in names) if isinstance(s, int))
        memory = moved / (gpu.bandwidth_gbs * 1e9 * _REACHED)
        if node.kernel == COPY:
            return LAUNCH_S + memory, 1.0
        launches = self._programs[node.kernel].launches
        blocks = max((l.grid[0] * l.grid[1] * l.grid[2] for l in launches), default=1)
        matrix = self._rules.get(node.kernel, "").removeprefix("tuned:") in MATRIX_RULES
        macs = (gpu.f16_macs if matrix else _SIMT_MACS) * min(blocks, gpu.multiprocessors)
        compute = node.flops / 2 / (macs * gpu.clock_ghz * 1e9 * _REACHED)
        seconds = LAUNCH_S * max(1, len(launches)) + max(memory, compute)
        return seconds, max((self._share(l) for l in launches), default=1.0)

    def _share(self, launch: Launch) -> float:
        gpu, kernel = self._gpu, launch.kernel
        used = self._resources[kernel]
        shared = used.static_shared + launch.shared_bytes
        resident = max(1, resident_blocks(launch.threads, used.registers, shared, gpu))
        x, y, z = launch.grid
        return min(1.0, x * y * z / (resident * gpu.multiprocessors))
