"""What a CUDA candidate may take, where no device tells: the analytical model, corrected by what the compiler reports.

Such figures rank candidates; they are `Prediction` records, never trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvmx.passes.legalize.gemm_model import LAUNCH_US, Problem, Tile, estimate, step_of
from tvmx.schedule import Workload
from tvmx.target import Gpu, Target
from tvmx.tune.space import Candidate
from tvmx.tune.task import Task

MATRIX_RULES = ("cuda.mma", "cuda.mma_padded", "cuda.wmma")
HALF = 0.5  # resident share of a multiprocessor's threads from which memory is kept busy
SPILL_COST = 1 / 64  # of the time, for each byte spilled by a thread
WORST = 1e3  # seconds, of what cannot run


class Predictor:
    """Seconds for candidates of one task on `target` (kind "cuda")."""

    def __init__(self, task: Task, target: Target) -> None:
        assert target.gpu is not None, "a CUDA target"
        self.gpu: Gpu = target.gpu
        self._problem = _problem(task.func)
        self._bytes = _touched(task.func)

    def __call__(self, candidate: Candidate, facts: Mapping[str, Any] | None = None) -> float:
        """Before (`facts` None) or after it was compiled."""
        kernels: Sequence[Mapping[str, Any]] = (facts or {}).get("kernels", ())
        spilled = sum(int(k["spills"]) for k in kernels)
        if any(not k["blocks_per_sm"] for k in kernels):
            return WORST
        seconds: float = self._product(candidate, kernels) if self._problem else self._traffic(kernels)
        return min(WORST, seconds * (1 + SPILL_COST * spilled))

    def rank(self, candidates: Sequence[Candidate]) -> list[float]:
        """Scores for `evolve`: higher is faster."""
        return [-self(c) for c in candidates]

    def _product(self, candidate: Candidate, kernels: Sequence[Mapping[str, Any]]) -> float:
        from tvmx_schedules.cuda.gemm import tile_of

        problem = self._problem
        assert problem is not None
        if candidate.space not in MATRIX_RULES:
            macs = problem.groups * problem.m * problem.n * problem.k
            return self._traffic(kernels) + macs / self._simt_macs()
        step = 16 if candidate.space == "cuda.wmma" else step_of(problem.dtype, self.gpu)
        tile: Tile = tile_of(candidate.decisions, step)
        found = estimate(tile, problem, self.gpu, kernels[0]["blocks_per_sm"] if kernels else None)
        slower = 1.3 if candidate.space == "cuda.wmma" and self.gpu.has_mma else 1.0  # no async copies
        return found.microseconds * 1e-6 * slower if math.isfinite(found.microseconds) else WORST

    def _traffic(self, kernels: Sequence[Mapping[str, Any]]) -> float:
        """Every tensor once through device memory, at the rate that so many threads keep in flight."""
        use = 1.0
        for kernel in kernels:
            resident = kernel["blocks_per_sm"] * kernel["threads"] / self.gpu.max_threads
            filled = kernel["blocks"] / max(1, kernel["blocks_per_sm"] * self.gpu.multiprocessors)
            use = min(use, resident / HALF, max(filled, 1 / self.gpu.multiprocessors))
        launches = max(1, len(kernels))
        return launches * LAUNCH_US * 1e-6 + self._bytes / (self.gpu.bandwidth_gbs * 1e9 * 0.85 * max(use, 1e-3))

    def _simt_macs(self) -> float:
        return self.gpu.multiprocessors * 128 * self.gpu.clock_ghz * 1e9 * 0.3


def _problem(func: Any) -> Problem | None:
    """The matrix product in a kernel, padding left out."""
    anchor = Workload.of(func).anchor
    if anchor is None or anchor.op != "cuda.gemm":
        return None
    groups, m, n, k = (int(v) for v in anchor.annotations["tvmx.size"])
    dtype = anchor.reads[0]
    out = [p for p in func.params if hasattr(p.ty, "shape")][-1]
    return Problem(groups, m, n, k, dtype, _element(str(out.dtype)))


def _touched(func: Any) -> int:
    buffers = [p for p in func.params if hasattr(p.ty, "shape")]
    return sum(math.prod(int(d) for d in b.shape) * _element(str(b.dtype)) for b in buffers)


def _element(dtype: str) -> int:
    bits = "".join(c for c in dtype if c.isdigit())
    return max(1, int(bits or 8) // 8)
