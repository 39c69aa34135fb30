"""What the generated code runs on: hardware facts by feature, never by CPU name."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import ConfigError
from tvmx.runtime.machine import TILES, request_tiles

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Gpu:
    """Facts of one NVIDIA GPU that its schedules decide by; rates are dense peaks at boost clock.

    `sm` is the compute capability (80 for 8.0). Shared memory and registers are per multiprocessor unless named
    otherwise; bandwidth is of device memory.
    """

    model: str
    sm: int
    multiprocessors: int
    shared_bytes: int
    shared_bytes_per_block: int
    max_threads: int  # resident on one multiprocessor
    max_blocks: int
    clock_ghz: float
    f16_macs: int  # f16 × f16 + f32 multiply-adds a cycle, all Tensor Cores of one multiprocessor
    bandwidth_gbs: float
    l2_bytes: int
    registers: int = 65536

    @property
    def has_mma(self) -> bool:
        """`mma.sync.m16n8k16`, `ldmatrix` with it, and `cp.async`; before that only wmma."""
        return self.sm >= 80

    @property
    def int8_macs(self) -> int:
        return 2 * self.f16_macs


@dataclass(frozen=True)
class Target:
    """Facts that schedules decide by.

    `features` are Linux cpuinfo flags (`avx2`, `avx512f`, `avx512_vnni`, `asimd`, `asimddp`, ...).
    Cache sizes are bytes a core (L3: bytes in all). `threads` is how many threads kernels are made for.
    """

    name: str
    kind: str = "cpu"  # "cpu" | "cuda"
    arch: str = "x86_64"  # "x86_64" | "aarch64"
    features: frozenset[str] = frozenset()
    threads: int = 1
    l1_bytes: int = 32 * KIB
    l2_bytes: int = 512 * KIB
    l3_bytes: int = 8 * MIB
    gpu: Gpu | None = None  # of kind "cuda" only

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads={self.threads}: use at least 1")
        if (self.kind == "cuda") != (self.gpu is not None):
            raise ConfigError(f"target {self.name!r} of kind {self.kind!r}: give gpu= for kind 'cuda' and only for it")

    def has(self, *features: str) -> bool:
        return self.features.issuperset(features)

    @property
    def vector_bytes(self) -> int:
        """Widest vector register, in bytes."""
        if self.has("avx512f", "avx512vl", "avx512bw", "avx512dq"):
            return 64
        if self.has("avx2", "fma"):
            return 32
        return 16

    @property
    def vector_registers(self) -> int:
        """Architectural vector registers."""
        return 32 if self.vector_bytes == 64 or self.arch == "aarch64" else 16

    def lanes(self, dtype: str) -> int:
        """Elements of `dtype` in one vector register."""
        bits = int("".join(c for c in dtype if c.isdigit()) or 8)
        return max(1, self.vector_bytes * 8 // bits)

    def needed_features(self) -> frozenset[str]:
        """The features that generated code may use: a machine without one of them cannot run it."""
        return self.features & frozenset(_LLVM_ARM if self.arch == "aarch64" else _LLVM_X86)

    def tvm(self) -> Any:
        """The `tvm.target.Target` for code generation."""
        import tvm

        return tvm.target.Target(self.tvm_dict())

    def tvm_dict(self) -> dict[str, Any]:
        """The same as a dict: `mattr` lists features, `mcpu` is only the level that they amount to."""
        if self.gpu is not None:
            return {
                "kind": "cuda",
                "arch": f"sm_{self.gpu.sm}",
                "max_threads_per_block": 1024,
                "thread_warp_size": 32,
                "max_shared_memory_per_block": self.gpu.shared_bytes_per_block,
                "registers_per_block": self.gpu.registers,
                "host": {"kind": "llvm"},
            }
        out: dict[str, Any] = {"kind": "llvm", "num-cores": self.threads}
        if self.arch == "aarch64":
            out["mtriple"] = "aarch64-linux-gnu"
            mattr = [_LLVM_ARM[f] for f in sorted(self.features) if f in _LLVM_ARM]
        else:
            out["mtriple"] = "x86_64-linux-gnu"
            out["mcpu"] = "x86-64"
            mattr = [_LLVM_X86[f] for f in sorted(self.features) if f in _LLVM_X86]
            if self.vector_bytes == 64:
                mattr.append("-prefer-256-bit")
        if mattr:
            out["mattr"] = mattr
        return out


# cpuinfo flag -> LLVM attribute. Only what code generation gains from; each is checked at load time.
_LLVM_X86 = {
    "ssse3": "+ssse3", "sse4_1": "+sse4.1", "sse4_2": "+sse4.2", "popcnt": "+popcnt",
    "avx": "+avx", "avx2": "+avx2", "fma": "+fma", "f16c": "+f16c", "bmi1": "+bmi", "bmi2": "+bmi2",
    "avx512f": "+avx512f", "avx512vl": "+avx512vl", "avx512bw": "+avx512bw", "avx512dq": "+avx512dq",
    "avx512cd": "+avx512cd", "avx512_vnni": "+avx512vnni", "avx512_bf16": "+avx512bf16",
    "avx512vbmi": "+avx512vbmi",
    "avx512_fp16": "+avx512fp16", "avx_vnni": "+avxvnni",
    "amx_int8": "+amx-int8", "amx_tile": "+amx-tile", "amx_bf16": "+amx-bf16",
}  # fmt: skip
_LLVM_ARM = {"asimddp": "+dotprod", "asimdhp": "+fullfp16", "i8mm": "+i8mm", "bf16": "+bf16"}

_SSE = frozenset({"ssse3", "sse4_1", "sse4_2", "popcnt"})
_AVX2 = _SSE | {"avx", "avx2", "fma", "f16c", "bmi1", "bmi2"}
_AVX512 = _AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512cd"}


def _cuda(name: str, gpu: Gpu) -> Target:
    return Target(name, kind="cuda", gpu=gpu)


# model, sm, multiprocessors, shared a multiprocessor and a block, threads, blocks, GHz, f16 MACs/cycle, GB/s, L2
_T4 = Gpu("T4", 75, 40, 64 * KIB, 64 * KIB, 1024, 16, 1.59, 512, 320, 4 * MIB)
_A100 = Gpu("A100", 80, 108, 164 * KIB, 163 * KIB, 2048, 32, 1.41, 1024, 1555, 40 * MIB)
_RTX3090 = Gpu("RTX 3090", 86, 82, 100 * KIB, 99 * KIB, 1536, 16, 1.70, 256, 936, 6 * MIB)
_RTX4090 = Gpu("RTX 4090", 89, 128, 100 * KIB, 99 * KIB, 1536, 24, 2.52, 256, 1008, 72 * MIB)
_L4 = Gpu("L4", 89, 58, 100 * KIB, 99 * KIB, 1536, 24, 2.04, 512, 300, 48 * MIB)
# mma.sync reaches about 60 % of the rate of Hopper's own wgmma, 2048 multiply-adds a cycle.
_H100 = Gpu("H100", 90, 132, 228 * KIB, 227 * KIB, 2048, 32, 1.83, 1229, 3350, 50 * MIB)
_H200 = Gpu("H200", 90, 132, 228 * KIB, 227 * KIB, 2048, 32, 1.83, 1229, 4800, 50 * MIB)

PRESETS: dict[str, Target] = {
    "cuda-sm75": _cuda("cuda-sm75", _T4),
    "cuda-sm80": _cuda("cuda-sm80", _A100),
    "cuda-sm86": _cuda("cuda-sm86", _RTX3090),
    "cuda-sm89": _cuda("cuda-sm89", _RTX4090),
    "cuda-sm89-l4": _cuda("cuda-sm89-l4", _L4),
    "cuda-sm90": _cuda("cuda-sm90", _H100),
    "cuda-sm90-h200": _cuda("cuda-sm90-h200", _H200),
    "x86_64-sse": Target("x86_64-sse", features=_SSE),
    "x86_64-avx2": Target("x86_64-avx2", features=_AVX2),
    "x86_64-avx512": Target("x86_64-avx512", features=_AVX512, l2_bytes=MIB),
    "x86_64-avx512-vnni": Target("x86_64-avx512-vnni", features=_AVX512 | {"avx512_vnni"}, l2_bytes=MIB),
    "x86_64-avx512-vnni-amx": Target(
        "x86_64-avx512-vnni-amx",
        features=_AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8"},
        l2_bytes=2 * MIB,
    ),
    "aarch64-neon": Target("aarch64-neon", arch="aarch64", features=frozenset({"asimd"})),
    "aarch64-dotprod": Target("aarch64-dotprod", arch="aarch64", features=frozenset({"asimd", "asimddp"})),
}


def resolve(target: str | Target, threads: int | None = None) -> Target:
    """`"native"`, a preset's name, or a Target → Target, for `threads` threads when given.

    Raises ConfigError for an unknown name, listing the known ones.
    """
    import dataclasses

    if isinstance(target, str):
        if target == "native":
            target = detect_host()
        elif target in PRESETS:
            target = PRESETS[target]
        else:
            raise ConfigError(f"unknown target {target!r}; use 'native' or one of {sorted(PRESETS)}")
    return target if threads is None else dataclasses.replace(target, threads=threads)


@functools.cache
def detect_host() -> Target:
    """The machine this runs on, from /proc/cpuinfo and sysfs; AMX only where the system grants its tiles."""
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    sizes = _cache_sizes()
    features = cpu_features()
    if features & TILES and request_tiles() is not None:
        features -= TILES
    return Target(
        name="native",
        arch=arch,
        features=features,
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        l1_bytes=sizes.get(1, 32 * KIB),
        l2_bytes=sizes.get(2, 512 * KIB),
        l3_bytes=sizes.get(3, 8 * MIB),
    )


def cpu_features() -> frozenset[str]:
    """Flags of the first CPU in /proc/cpuinfo (`flags` on x86, `Features` on Arm)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_model() -> str:
    """The CPU's model name, for reports only."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cache_sizes() -> dict[int, int]:
    """Level → bytes of the data or unified cache of CPU 0."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level = int((index / "level").read_text())
            kind = (index / "type").read_text().strip()
            text = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and text.endswith("K"):
            sizes[level] = int(text[:-1]) * KIB
    return sizes
