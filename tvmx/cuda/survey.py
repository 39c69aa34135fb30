"""A whole program for a CUDA target: which schedule each kernel got, and what its machine code holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvmx.cuda.lower import lower_kernel
from tvmx.cuda.sass import KernelCode, inspect_program
from tvmx.errors import CompileError
from tvmx.target import Target

MATRIX_RULES = ("cuda.mma", "cuda.mma_padded", "cuda.wmma", "cuda.wgmma")


@dataclass(frozen=True)
class KernelLine:
    """One distinct kernel. `flops` are of one call; `codes` is empty where no compiler read its machine code."""

    name: str
    rule: str
    calls: int
    flops: int
    codes: tuple[KernelCode, ...] = ()

    @property
    def tensor_cores(self) -> bool:
        """By the machine code where it was read, else by the schedule."""
        if self.codes:
            return any(c.uses_tensor_cores for c in self.codes)
        return self.rule.removeprefix("tuned:") in MATRIX_RULES


@dataclass(frozen=True)
class Survey:
    """The kernels of a program for one target, most work first."""

    target: str
    kernels: tuple[KernelLine, ...]

    @property
    def flops(self) -> int:
        return sum(k.flops * k.calls for k in self.kernels)

    @property
    def tensor_core_share(self) -> float:
        """Of all FLOPs, those of kernels on Tensor Cores."""
        return sum(k.flops * k.calls for k in self.kernels if k.tensor_cores) / max(1, self.flops)

    @property
    def spills(self) -> int:
        return sum(c.spills for k in self.kernels for c in k.codes)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "flops": self.flops,
            "tensor_core_share": self.tensor_core_share,
            "kernels": [
                {
                    "name": k.name,
                    "rule": k.rule,
                    "calls": k.calls,
                    "flops": k.flops,
                    "tensor_cores": k.tensor_cores,
                    "code": [c.to_json() for c in k.codes],
                }
                for k in self.kernels
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.flops / 1e9:.3f} GFLOP, {self.tensor_core_share:.1%} on Tensor Cores"]
        lines.append(f"{'MFLOP':>10} {'calls':>5} {'TC':3} {'rule':18} kernel")
        for k in self.kernels:
            mark = "yes" if k.tensor_cores else "-"
            lines.append(f"{k.flops / 1e6:10.2f} {k.calls:5} {mark:3} {k.rule:18} {k.name}")
            lines += [f"{'':40}{line.strip()}" for c in k.codes for line in str(c).splitlines()]
        return "\n".join(lines)


def survey(
    mod: Any, scheduled: Any, rules: Mapping[str, str], target: Target, code: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Survey:  # fmt: skip
    """The kernels of a lowered module: `mod` unscheduled, `scheduled` and `rules` as `apply_schedules` returns them.

    `code` compiles each and reads its machine code; else it is only lowered to CUDA source. Raises CompileError for
    a kernel that does not lower or compile.
    """
    import tvm

    calls = _calls(mod)
    lines = []
    for var, func in mod.functions.items():
        name = var.name_hint
        if not isinstance(func, tvm.tirx.PrimFunc) or name not in rules or not calls.get(name):
            continue
        if progress is not None:
            progress(name)
        program = lower_kernel(_function(scheduled, name), target, name)
        assert target.gpu is not None, "a CUDA target"
        codes = tuple(inspect_program(program, target.gpu)) if code else ()
        lines.append(KernelLine(name, rules[name], calls[name], flops_of(func, name), codes))
    return Survey(target.name, tuple(sorted(lines, key=lambda k: -k.flops * k.calls)))


def flops_of(func: Any, name: str) -> int:
    """Multiply-adds count two. A Tensor Core product counts its own size, not its padding."""
    from tvmx.kernel_facts import kernel_facts
    from tvmx.schedule import Workload

    anchor = Workload.of(func).anchor
    if anchor is not None and anchor.op == "cuda.gemm":
        groups, m, n, k = (int(v) for v in anchor.annotations["tvmx.size"])
        return 2 * groups * m * n * k
    buffers = [p for p in func.params if hasattr(p.ty, "shape")]
    return int(kernel_facts(func, name, max(0, len(buffers) - 1)).flops)


def _function(mod: Any, name: str) -> Any:
    for var, func in mod.functions.items():
        if var.name_hint == name:
            return func
    raise CompileError(f"kernel {name!r} was not scheduled")


def _calls(mod: Any) -> Counter[str]:
    """How often each kernel is called."""
    import tvm
    from tvm import relax

    count: Counter[str] = Counter()

    def visit(expr: Any) -> None:
        if isinstance(expr, tvm.ir.Call) and getattr(expr.op, "name", "") == "relax.call_tir":
            count[expr.args[0].name_hint] += 1

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return count


def survey_model(lowered: Any, target: Target, code: bool = True, progress: Any = None) -> Survey:
    """The same for what `tvmx.api.lower` returns, with default schedules."""
    from tvmx.tune.apply import apply_schedules

    scheduled, rules = apply_schedules(lowered.mod, target)
    return survey(lowered.mod, scheduled, rules, target, code, progress)
