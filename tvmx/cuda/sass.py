"""Facts of a kernel's machine code: instructions, registers, spills, occupancy, work per tile."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvmx.cuda.lower import DeviceProgram, Launch, lower_kernel
from tvmx.cuda.nvcc import Cubin, Resources, compile_cubin
from tvmx.errors import CompileError
from tvmx.target import Gpu, Target

COUNTED = ("HMMA", "IMMA", "HGMMA", "LDSM", "LDGSTS", "LDG", "STG", "LDS", "STS", "LDL", "STL", "BAR", "FFMA", "IMAD")


@dataclass(frozen=True)
class KernelCode:
    """One kernel for one architecture. `shapes` are matrix instructions with their shape ("HMMA.16816.F32").

    `occupancy` is the resident share of the multiprocessor's threads. `macs` are multiply-adds a block's code holds
    in matrix instructions, unrolled as it stands (a loop's body once), `shared_bytes` static and dynamic in all.
    """

    kernel: str
    arch: str
    instructions: dict[str, int]
    shapes: tuple[str, ...]
    registers: int
    stack: int
    spills: int
    shared_bytes: int
    threads: int
    blocks: int
    blocks_per_sm: int
    occupancy: float
    macs: int

    @property
    def uses_tensor_cores(self) -> bool:
        return any(self.instructions.get(i, 0) for i in ("HMMA", "IMMA", "HGMMA"))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tensor_cores": self.uses_tensor_cores}

    def __str__(self) -> str:
        counts = " ".join(f"{k}={v}" for k, v in self.instructions.items())
        return (
            f"{self.kernel} ({self.arch}): {self.registers} registers, {self.stack} B stack, {self.spills} B spilled, "
            f"{self.shared_bytes} B shared, {self.threads} threads x {self.blocks} blocks, {self.blocks_per_sm} a "
            f"multiprocessor ({self.occupancy:.0%})\n  {counts}\n  {' '.join(self.shapes) or 'no matrix instructions'}"
        )


def disassembler() -> str | None:
    """cuobjdump on the PATH, of the CUDA toolkit or of the nvidia-cuda-cuobjdump wheel; None when there is none."""
    found = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(root).glob("*/bin/cuobjdump")):
            return str(path)
    return None


def disassemble(cubin: Cubin) -> str:
    """SASS text. Raises CompileError without a disassembler."""
    tool = disassembler()
    if tool is None:
        raise CompileError("no cuobjdump found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.data)
        file.flush()
        done = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"cuobjdump: {done.stderr.strip()[:300]}")
    return done.stdout


_FUNCTION = re.compile(r"^\s*Function : (\w+)", re.M)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)", re.M)
_MACS = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "884": 8 * 8 * 4, "16832": 16 * 8 * 32, "8816": 8 * 8 * 16}


def _macs(shape: str) -> int:
    """Of one instruction of one warp; HGMMA is a warpgroup's, "64x128x16"."""
    if "x" in shape:
        m, n, k = (int(v) for v in shape.split("x"))
        return m * n * k // 4
    return _MACS.get(shape, 0)


def functions(sass: str) -> dict[str, list[tuple[str, str]]]:
    """Kernel → (opcode, modifiers) of its instructions in order."""
    marks = list(_FUNCTION.finditer(sass))
    out = {}
    for here, after in zip(marks, [*marks[1:], None]):
        body = sass[here.end() : after.start() if after else len(sass)]
        out[here[1]] = [(m[1], m[2]) for m in _INSTRUCTION.finditer(body)]
    return out


def inspect_program(program: DeviceProgram, gpu: Gpu) -> list[KernelCode]:
    """Compile a lowered program for `gpu` and read its machine code, kernel by kernel."""
    cubin = compile_cubin(program.source, f"sm_{gpu.sm}", program.name)
    code = functions(disassemble(cubin))
    launches = {l.kernel: l for l in program.launches}
    return [code_facts(r, code[r.kernel], launches[r.kernel], gpu) for r in cubin.kernels if r.kernel in launches]


def inspect_kernel(func: Any, target: Target, name: str = "main") -> list[KernelCode]:
    """The same for a scheduled PrimFunc. Raises CompileError."""
    assert target.gpu is not None, "a CUDA target"
    return inspect_program(lower_kernel(func, target, name), target.gpu)


def code_facts(used: Resources, code: list[tuple[str, str]], launch: Launch, gpu: Gpu) -> KernelCode:
    """One kernel from its resources, its instructions (see `functions`) and its launch."""
    counts = Counter(op for op, _ in code)
    matrix = Counter(f"{op}{rest}" for op, rest in code if op in ("HMMA", "IMMA", "HGMMA"))
    macs = sum(_macs(name.split(".")[1]) * n for name, n in matrix.items())
    shared = used.static_shared + launch.shared_bytes
    resident = resident_blocks(launch.threads, used.registers, shared, gpu)
    x, y, z = launch.grid
    return KernelCode(
        kernel=used.kernel,
        arch=f"sm_{gpu.sm}",
        instructions={i: counts[i] for i in COUNTED if counts[i]},
        shapes=tuple(sorted(matrix)),
        registers=used.registers,
        stack=used.stack,
        spills=used.spill_stores + used.spill_loads,
        shared_bytes=shared,
        threads=launch.threads,
        blocks=x * y * z,
        blocks_per_sm=resident,
        occupancy=resident * launch.threads / gpu.max_threads,
        macs=macs * (launch.threads // 32),
    )


def resident_blocks(threads: int, registers: int, shared: int, gpu: Gpu) -> int:
    """Blocks that a multiprocessor holds at a time."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256  # registers are given out 256 to a warp
    reserve = 1024 if gpu.sm >= 80 else 0  # of shared memory, by the system for each block
    limits = [gpu.max_threads // (warps * 32), gpu.max_blocks, gpu.registers // max(1, per_warp * warps)]
    if shared:
        limits.append(gpu.shared_bytes // (shared + reserve))
    return min(limits)
