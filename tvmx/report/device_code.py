"""The machine code inside a CUDA library, read from the file: nothing of it is loaded or run."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from tvmx.cuda.survey import MATRIX_RULES
from tvmx.errors import ArtifactError
from tvmx.runtime.artifact import Artifact, read_artifact
from tvmx.runtime.elf import read_elf
from tvmx.runtime.manifest import DeviceKernel, Entry
from tvmx.runtime.seal import CUDA_SECTION


def read_cubins(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Program → its cubin. Raises ArtifactError for a CPU library, or a damaged one."""
    artifact = read_artifact(path)
    device = artifact.manifest.device
    if device is None:
        raise ArtifactError(f"{artifact.path} was built for {artifact.manifest.target} and holds no CUDA code")
    with open(artifact.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        section = read_elf(file, size, artifact.path).sections.get(CUDA_SECTION)
        if section is None:
            raise ArtifactError(f"{artifact.path} has lost its CUDA code; compile it again")
        found = {}
        for kernel in device.kernels:
            at, count = kernel.cubin
            if not 0 <= at <= at + count <= section.size:
                raise ArtifactError(f"{artifact.path} has a damaged manifest (code of {kernel.name}); compile it again")
            file.seek(section.offset + at)
            found[kernel.program] = file.read(count)
    return found


def survey_artifact(path: str | os.PathLike[str]) -> Any:
    """The kernels of a CUDA library with their machine code: a `tvmx.cuda.survey.Survey`.

    Raises ArtifactError, or CompileError without cuobjdump.
    """
    from tvmx.cuda.lower import Launch
    from tvmx.cuda.nvcc import Cubin, Resources
    from tvmx.cuda.sass import code_facts, disassemble, functions
    from tvmx.cuda.survey import KernelLine, Survey
    from tvmx.target import PRESETS

    manifest = read_artifact(path).manifest
    cubins = read_cubins(path)
    device, target = manifest.device, PRESETS.get(manifest.target)
    if device is None or target is None or target.gpu is None:
        raise ArtifactError(f"{os.fspath(path)} is for {manifest.target}, which this version does not know")
    code = {}
    for data in cubins.values():
        code.update(functions(disassemble(Cubin(data, device.arch, ()))))
    kernels = {k.name: k for k in device.kernels}
    nodes = [n for e in manifest.entries.values() for n in e.nodes if n.launches]
    calls = Counter(n.launches[0].kernel for n in nodes)
    lines = []
    for node in {n.launches[0].kernel: n for n in nodes}.values():
        codes = []
        for launch in node.launches:
            k = kernels[launch.kernel]
            used = Resources(k.name, k.registers, k.stack, k.spills, 0, k.shared - launch.shared)
            shape = Launch(k.name, (), launch.grid, launch.block, launch.shared)
            codes.append(code_facts(used, code[k.name], shape, target.gpu))
        lines.append(KernelLine(node.kernel, node.rule, calls[node.launches[0].kernel], node.flops, tuple(codes)))
    return Survey(manifest.target, tuple(sorted(lines, key=lambda l: -l.flops * l.calls)))


def tensor_core_share(entries: dict[str, Entry]) -> float:
    """Of all FLOPs, those of kernels whose schedule computes on Tensor Cores."""
    nodes = [n for e in entries.values() for n in e.nodes]
    matrix = sum(n.flops for n in nodes if n.rule.removeprefix("tuned:") in MATRIX_RULES)
    return matrix / max(1, sum(n.flops for n in nodes))


def device_json(artifact: Artifact) -> dict[str, Any] | None:
    """What a CUDA library needs of a GPU and holds for it; None for a CPU library."""
    device = artifact.manifest.device
    if device is None:
        return None
    return {
        "arch": device.arch,
        "sm": device.sm,
        "exact": device.exact,
        "cubin_bytes": sum({k.program: k.cubin[1] for k in device.kernels}.values()),
        "ptx_bytes": sum({k.program: k.ptx[1] for k in device.kernels}.values()),
        "spilled_bytes": sum(k.spills for k in device.kernels),
        "kernels": [_kernel_json(k) for k in device.kernels],
    }


def device_lines(artifact: Artifact) -> list[str]:
    """The same in words."""
    device = artifact.manifest.device
    facts = device_json(artifact)
    if device is None or facts is None:
        return []
    newer = "on that GPU alone" if device.exact else f"compute capability {device.sm / 10} or higher"
    lines = [
        f"  needs    an NVIDIA GPU, {newer}; machine code for {device.arch} ({facts['cubin_bytes'] / 1e3:.0f} kB), PTX "
        f"for newer ones ({facts['ptx_bytes'] / 1e3:.0f} kB)",
        f"  of all FLOPs {tensor_core_share(artifact.manifest.entries):.1%} on Tensor Cores, "
        f"{facts['spilled_bytes']} bytes spilled",
        f"  {'registers':>9} {'shared':>8} {'threads':>7}  kernel",
    ]
    return lines + [f"  {k.registers:9} {k.shared:8} {k.threads:7}  {k.name}" for k in device.kernels]


def _kernel_json(kernel: DeviceKernel) -> dict[str, Any]:
    names = ("name", "registers", "stack", "spills", "shared", "threads")
    return {n: getattr(kernel, n) for n in names}
