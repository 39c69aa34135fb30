"""Where the time goes: per kernel time, bytes, FLOPs, rate and share of the machine's measured peak."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmx.runtime.dims import evaluate
from tvmx.runtime.manifest import Entry, Node

if TYPE_CHECKING:
    from tvmx.runtime.library import Library
    from tvmx.runtime.program import GraphProgram


@dataclass(frozen=True)
class KernelProfile:
    """One kernel call: median seconds, bytes of its inputs and outputs, operations and the dtype of their operands."""

    name: str
    op: str
    kernel: str
    rule: str
    seconds: float
    bytes: int
    flops: int
    arithmetic: str = "float32"  # or "int8", "bfloat16": products of the target's dot unit

    @property
    def flop_rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds if self.seconds > 0 else 0.0

    @property
    def byte_rate(self) -> float:
        """Bytes/s."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Profile:
    """Kernel calls in order. Measured: `peaks`, FLOP/s by dtype, and `peak_bandwidth`, bytes/s out of cache."""

    entry: str
    threads: int
    runs: int
    kernels: tuple[KernelProfile, ...]
    run_seconds: float  # median of the whole run, stamps included
    peaks: Mapping[str, float]
    peak_bandwidth: float
    starts: tuple[float, ...]  # seconds from the start of a typical run

    def share_of_peak(self, kernel: KernelProfile) -> float:
        """Fraction of the measured peak of its arithmetic, or of fp32 where the target has no unit for that."""
        peak = self.peaks.get(kernel.arithmetic) or self.peaks.get("float32", 0.0)
        return kernel.flop_rate / peak if peak else 0.0

    def table(self, top: int | None = None) -> str:
        """The slowest kernels first; `top` limits how many."""
        total = sum(k.seconds for k in self.kernels) or 1.0
        rows = sorted(self.kernels, key=lambda k: -k.seconds)[:top]
        width = min(44, max([len(k.op) for k in rows] or [4]))
        lines = [
            f"{'operator':{width}}  {'time':>10}  {'share':>6}  {'GFLOP/s':>8}  {'of peak':>7}  {'GB/s':>7}  schedule"
        ]
        for k in rows:
            lines.append(
                f"{k.op[:width]:{width}}  {k.seconds * 1e6:>7.1f} us  {k.seconds / total:>6.1%}  "
                f"{k.flop_rate / 1e9:>8.1f}  {self.share_of_peak(k):>7.1%}  {k.byte_rate / 1e9:>7.1f}  {k.rule}"
            )
        flops = sum(k.flops for k in self.kernels)
        summary = f"{len(self.kernels)} kernels, {total * 1e3:.3f} ms, {flops / total / 1e9:.1f} GFLOP/s"
        if self.peaks:  # not measured on a GPU
            rates = ", ".join(f"{rate / 1e9:.1f} {dtype}" for dtype, rate in self.peaks.items())
            summary += (
                f" on {self.threads} threads; this machine: GFLOP/s {rates}, {self.peak_bandwidth / 1e9:.1f} GB/s"
            )
        lines.append(summary)
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "entry": self.entry,
            "threads": self.threads,
            "runs": self.runs,
            "run_seconds": self.run_seconds,
            "peaks": dict(self.peaks),
            "peak_bandwidth": self.peak_bandwidth,
            "kernels": [
                {
                    **asdict(k),
                    "flop_rate": k.flop_rate,
                    "byte_rate": k.byte_rate,
                    "share_of_peak": self.share_of_peak(k),
                }
                for k in self.kernels
            ],
        }

    def chrome_trace(self) -> dict[str, Any]:
        """A trace for chrome://tracing or Perfetto: one typical run."""
        events = [
            {
                "name": k.op or k.name,
                "cat": "kernel",
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": start * 1e6,
                "dur": k.seconds * 1e6,
                "args": {"node": k.name, "kernel": k.kernel, "rule": k.rule, "flops": k.flops, "bytes": k.bytes},
            }
            for k, start in zip(self.kernels, self.starts)
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write `chrome_trace` as JSON."""
        Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")

    def __str__(self) -> str:
        return self.table()


def profile_program(program: GraphProgram, library: Library, pool: int, threads: int, runs: int) -> Profile:
    """Time `runs` runs on the inputs that are set. A time stamp costs about 10 ns."""
    entry = program.entry
    count = len(entry.nodes)
    program.run()
    stamps = np.zeros((max(1, runs), count + 1), np.int64)
    began, began_ticks = time.perf_counter(), library.ticks()
    program.stamped(stamps)
    seconds_per_tick = (time.perf_counter() - began) / max(1, library.ticks() - began_ticks)
    spent = np.diff(stamps, axis=1) * seconds_per_tick
    medians = np.median(spent, axis=0) if count else np.zeros(0)
    kernels = tuple(
        KernelProfile(
            name=node.name,
            op=node.op,
            kernel=node.kernel,
            rule=node.rule,
            seconds=float(medians[i]),
            bytes=node_bytes(entry, node, program.dims),
            flops=node.flops,
            arithmetic=_arithmetic(entry, node),
        )
        for i, node in enumerate(entry.nodes)
    )
    peaks, bandwidth = library.peak(pool, threads)
    return Profile(
        entry=entry.name,
        threads=threads,
        runs=len(stamps),
        kernels=kernels,
        run_seconds=float(statistics.median((stamps[:, -1] - stamps[:, 0]) * seconds_per_tick)),
        peaks=peaks,
        peak_bandwidth=bandwidth,
        starts=tuple(float(s) for s in np.concatenate([[0.0], np.cumsum(medians)[:-1]])) if count else (),
    )


def _arithmetic(entry: Entry, node: Node) -> str:
    if node.rule.removeprefix("tuned:") not in ("cpu.dot_conv", "cpu.dot_matmul"):
        return "float32"
    return "bfloat16" if any(entry.tensors[n].dtype == "bfloat16" for n in node.inputs) else "int8"


def node_bytes(entry: Entry, node: Node, dims: dict[str, int]) -> int:
    """Bytes of the distinct tensors that a node reads and writes."""
    names = dict.fromkeys((*node.inputs, *node.outputs))
    return sum(evaluate(entry.tensors[n].bytes, dims) for n in names)
