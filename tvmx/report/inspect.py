"""What a compiled `.so` holds, from its manifest alone: nothing of it is loaded or run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.report.device_code import device_json, device_lines, tensor_core_share
from tvmx.runtime.artifact import Artifact, read_artifact
from tvmx.runtime.manifest import Entry


@dataclass(frozen=True)
class Description:
    """A `.so` in words: `str()` is for people, `to_json()` for scripts."""

    artifact: Artifact

    def to_json(self) -> dict[str, Any]:
        """Facts of the library and, per entry, inputs, outputs, kernels, arena and constants."""
        m = self.artifact.manifest
        first = next(iter(m.entries.values()))
        return {
            "path": self.artifact.path,
            "bytes": Path(self.artifact.path).stat().st_size,
            "tvmx": m.tvmx,
            "tvm": m.tvm,
            "executor": m.executor,
            "reason": m.reason,
            "target": m.target,
            "arch": m.arch,
            "features": sorted(m.features),
            "threads": m.threads,
            "parameter_bytes": m.parameter_bytes,
            "kernels": _kernels(first),
            **_device(self.artifact),
            "entries": {name: _entry_json(e) for name, e in m.entries.items()},
        }

    def __str__(self) -> str:
        facts = self.to_json()
        lines = [
            f"{facts['path']}: {facts['bytes'] / 1e6:.2f} MB, parameters {facts['parameter_bytes'] / 1e6:.2f} MB",
            f"  made by tvmx {facts['tvmx']} with TVM {facts['tvm']} for {facts['target']} ({facts['arch']}), "
            f"{facts['threads']} thread(s)",
            f"  needs {', '.join(facts['features']) or 'no CPU feature beyond the baseline'}",
        ]
        lines += device_lines(self.artifact)
        if facts["reason"]:
            lines.append(f"  runs through the Relax VM: {facts['reason']}")
        for name, entry in self.artifact.manifest.entries.items():
            lines += ["", f"entry {name}", *_entry_lines(entry, planned=facts["executor"] != "vm")]
        return "\n".join(lines)


def describe(path: str | Path) -> Description:
    """Read and check a `.so`. Raises ArtifactError when it is damaged or foreign."""
    return Description(read_artifact(path))


def _device(artifact: Artifact) -> dict[str, Any]:
    device = device_json(artifact)
    return (
        {} if device is None else {"device": device, "tensor_core_share": tensor_core_share(artifact.manifest.entries)}
    )


def _kernels(entry: Entry) -> dict[str, int]:
    """Schedule rule → number of distinct kernels."""
    rules = {n.kernel: n.rule for n in entry.nodes}
    return dict(sorted(Counter(rules.values()).items()))


def _entry_json(entry: Entry) -> dict[str, Any]:
    arena = entry.arena
    return {
        "inputs": [vars(t) for t in entry.inputs],
        "outputs": [vars(t) for t in entry.outputs],
        "dims": entry.dims,
        "nodes": [
            {
                "op": n.op,
                "kernel": n.kernel,
                "rule": n.rule,
                "flops": n.flops,
                "shape": entry.tensors[n.outputs[0]].shape,
            }
            for n in entry.nodes
        ],
        "constants": [
            {"name": t.name, "shape": t.shape, "dtype": t.dtype, "bytes": t.bytes}
            for t in entry.tensors.values()
            if t.kind == "constant"
        ],
        "arena": {
            "bytes": arena.bytes,
            "lower_bound": arena.lower_bound,
            "unshared_bytes": arena.unshared_bytes,
            "planner": arena.planner,
            "buffers": len(arena.buffers),
        },
        **({"streams": entry.streams.count, "events": entry.streams.events} if entry.streams is not None else {}),
    }


def _entry_lines(entry: Entry, planned: bool = True) -> list[str]:
    def signature(tensors: Any) -> str:
        return ", ".join(f"{t.name}: {t.dtype}[{','.join(map(str, t.shape))}]" for t in tensors)

    lines = [f"  inputs   {signature(entry.inputs)}", f"  outputs  {signature(entry.outputs)}"]
    for check in entry.checks:
        lines.append(f"  checks   {check.input} in [{check.low}, {check.high}] for {check.node}")
    arena = entry.arena
    if not planned:
        lines.append("  arena    none: the Relax VM allocates each tensor as it runs")
    elif arena.bytes is None:
        lines.append(f"  arena    {len(arena.buffers)} buffers, planned at run time for each shape")
    else:
        unshared = arena.unshared_bytes or 0
        saved = f", {1 - arena.bytes / unshared:.0%} less than without sharing" if unshared else ""
        lines.append(
            f"  arena    {arena.bytes:,} bytes, lower bound {arena.lower_bound:,}, planner {arena.planner}{saved}"
        )
    if entry.streams is not None:
        lines.append(f"  streams  {entry.streams.count}, {entry.streams.events} events")
    constants = [t for t in entry.tensors.values() if t.kind == "constant"]
    lines.append(f"  constants {len(constants)}, kernels by rule {_kernels(entry)}")
    lines.append(f"  {'#':>4} {'MFLOP':>9}  {'rule':28} {'output':28} operators")
    for index, node in enumerate(entry.nodes):
        output = entry.tensors[node.outputs[0]]
        shape = f"{output.dtype}[{','.join(map(str, output.shape))}]"
        lines.append(f"  {index:4} {node.flops / 1e6:9.2f}  {node.rule or 'copy':28} {shape:28} {node.op}")
    return lines
