"""The manifest: what the runtime must know of a library, as JSON in a section of its own. See docs/runtime.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmx.executor.host_code import HostSource
from tvmx.executor.lifetimes import tensor_bytes
from tvmx.graph import Graph
from tvmx.memory import Solution
from tvmx.runtime.arena import ArenaBuffer
from tvmx.runtime.machine import TILES
from tvmx.runtime.manifest import Branch
from tvmx.target import Target

FORMAT = 1
ABI = 1


@dataclass(frozen=True)
class Bounds:
    """Inclusive range of each symbolic dim; None: no upper bound."""

    ranges: Mapping[str, tuple[int, int | None]]

    @classmethod
    def of(cls, dims: Mapping[str, Any]) -> Bounds:
        """From `tvmx.config.Dim`s by name."""
        return cls({name: (int(d.min), None if d.max is None else int(d.max)) for name, d in dims.items()})


def library_manifest(
    entries: Mapping[str, Any],
    target: Target,
    parameter_bytes: int,
    executor: str,
    reason: str | None = None,
    branches: Mapping[str, Branch] | None = None,
) -> dict[str, Any]:
    """The whole manifest; `reason` says why the Relax VM runs the model."""
    import tvm

    from tvmx import __version__

    return {
        "format": FORMAT,
        "abi": ABI,
        "tvmx": __version__,
        "tvm": str(tvm.__version__),
        "executor": executor,
        "reason": reason,
        "target": {
            "name": target.name,
            "arch": target.arch,
            "features": sorted(target.needed_features() - (set() if _may_use_tiles(entries, executor) else TILES)),
            "threads": target.threads,
        },
        "parameter_bytes": parameter_bytes,
        "entries": dict(entries),
        "branches": {name: dataclasses.asdict(b) for name, b in (branches or {}).items()},
    }


def _may_use_tiles(entries: Mapping[str, Any], executor: str) -> bool:
    """Does a kernel use AMX? The code generator never does by itself, and such kernels need the system's permission."""
    return executor == "vm" or any("_amx" in n["kernel"] for e in entries.values() for n in e["nodes"])


def entry_manifest(
    graph: Graph,
    rules: Mapping[str, str],
    buffers: Sequence[ArenaBuffer],
    solution: Solution | None,
    source: HostSource,
    constant_offsets: Mapping[str, int],
    bounds: Bounds,
    checks: Sequence[Any],
) -> dict[str, Any]:
    """One entry of the manifest."""
    return {
        "inputs": [_public(graph, n) for n in graph.inputs],
        "outputs": [_public(graph, n) for n in graph.outputs],
        "dims": {name: list(r) for name, r in bounds.ranges.items()},
        "checks": [{"input": c.input, "low": c.low, "high": c.high, "node": c.node} for c in checks],
        "guards": [[g.left, g.right] for g in graph.guards],
        "values": list(source.expressions),
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "kind": t.kind,
                "alias_of": t.alias_of,
                **({"alias_offset": t.alias_offset} if t.alias_offset != 0 else {}),
                "bytes": tensor_bytes(t),
                **({"offset": constant_offsets[t.name]} if t.name in constant_offsets else {}),
            }
            for t in graph.tensors.values()
        ],
        "nodes": [
            {
                "name": n.name,
                "kernel": n.kernel,
                "op": n.op,
                "inputs": list(n.inputs),
                "outputs": list(n.outputs),
                "flops": n.flops,
                "rule": rules.get(n.kernel, n.rule),
            }
            for n in graph.nodes
        ],
        "arena": {
            "buffers": [[b.id, b.start, b.end, b.size, b.over] for b in buffers],
            "offsets": solution.offsets if solution else None,
            "bytes": solution.height if solution else None,
            "lower_bound": solution.lower_bound if solution else None,
            "unshared_bytes": sum(b.size for b in buffers if isinstance(b.size, int)) if solution else None,
            "planner": solution.planner if solution else None,
        },
    }


def _public(graph: Graph, name: str) -> dict[str, Any]:
    tensor = graph.tensors[name]
    return {
        "name": graph.public_names.get(name, name),
        "tensor": name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
    }
