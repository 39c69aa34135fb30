"""One kernel for one GPU as a shared object: machine code and launches, no source; `tvmx.tune.run_cuda` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tvmx.cuda.lower import DeviceProgram
from tvmx.cuda.nvcc import Cubin, compile_cubin
from tvmx.cuda.sass import resident_blocks
from tvmx.errors import CompileError
from tvmx.target import Gpu

_ASSEMBLY = """.section .rodata
.balign 64
.globl tvmx_cubin
.type tvmx_cubin, %object
.size tvmx_cubin, {size}
tvmx_cubin: .incbin "kernel.cubin"
.globl tvmx_launches
.type tvmx_launches, %object
tvmx_launches: .incbin "launches.json"
.byte 0
.size tvmx_launches, . - tvmx_launches
.section .note.GNU-stack,"",%progbits
"""


def build_candidate(program: DeviceProgram, gpu: Gpu, output: Path) -> dict[str, Any]:
    """Compile `program` for `gpu` and link it as `output`; returns facts for `tvmx.tune.predict`.

    Raises CompileError without a CUDA or C compiler, for code that does not compile, and for a kernel that no
    multiprocessor of `gpu` can hold.
    """
    cubin = compile_cubin(program.source, f"sm_{gpu.sm}", program.name)
    facts = resources(program, cubin, gpu)
    for launch in facts["kernels"]:
        if not launch["blocks_per_sm"] or launch["shared"] > gpu.shared_bytes_per_block:
            raise CompileError(
                f"{program.name}: a block of {launch['threads']} threads, {launch['registers']} registers and "
                f"{launch['shared']} bytes of shared memory fits no multiprocessor of {gpu.model}"
            )
    link(cubin.data, launches_json(program), output)
    return facts


def launches_json(program: DeviceProgram) -> str:
    """What the host does to run the program: launches in order, and workspaces as (shape, dtype)."""
    spaces: dict[int, Any] = {}
    for launch in program.launches:
        for a in launch.arguments:
            if a.index < 0:
                spaces[-1 - a.index] = [list(a.shape), a.dtype]
    launches = [
        {
            "kernel": l.kernel,
            "grid": l.grid,
            "block": l.block,
            "shared": l.shared_bytes,
            "arguments": [a.index for a in l.arguments],
        }
        for l in program.launches
    ]
    return json.dumps({"launches": launches, "spaces": [spaces[i] for i in sorted(spaces)]})


def resources(program: DeviceProgram, cubin: Cubin, gpu: Gpu) -> dict[str, Any]:
    """Registers, spills, shared memory and occupancy of each launch."""
    used = {k.kernel: k for k in cubin.kernels}
    kernels = []
    for launch in program.launches:
        found = used.get(launch.kernel)
        if found is None:
            continue
        shared = found.static_shared + launch.shared_bytes
        x, y, z = launch.grid
        kernels.append(
            {
                "threads": launch.threads,
                "blocks": x * y * z,
                "registers": found.registers,
                "spills": found.spill_stores + found.spill_loads,
                "shared": shared,
                "blocks_per_sm": resident_blocks(launch.threads, found.registers, shared, gpu),
            }
        )
    return {"kernels": kernels}


def link(cubin: bytes, launches: str, output: Path) -> None:
    """A shared object with both as read-only data. Raises CompileError."""
    with tempfile.TemporaryDirectory(prefix="tvmx-candidate-") as folder:
        (Path(folder) / "kernel.cubin").write_bytes(cubin)
        (Path(folder) / "launches.json").write_text(launches)
        (Path(folder) / "candidate.s").write_text(_ASSEMBLY.format(size=len(cubin)))
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-shared", "-nostdlib", "-o", str(output.absolute()), "candidate.s"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:
            raise CompileError(f"linking needs the C compiler {compiler!r}; install gcc or set CC") from None
    if done.returncode:
        raise CompileError(f"{compiler} cannot link a candidate: {done.stderr.strip()[:300]}")
