"""Object files, host code, parameters and manifest → one sealed `.so`, put in place atomically."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import CompileError
from tvmx.executor.constants import ConstantPool
from tvmx.executor.host_code import PRELUDE
from tvmx.passes.legalize.dot_unit import bf16_unit, has_vnni
from tvmx.runtime.seal import CUDA_SECTION, MANIFEST_SECTION, SEAL_MAGIC, SEAL_SECTION, SEAL_SIZE, seal
from tvmx.target import Target

HERE = Path(__file__).parent
_C_FLAGS = ("-fPIC", "-std=gnu11", "-fvisibility=hidden", f"-I{HERE}", "-w")
_VECTOR_FLAGS = {("x86_64", 64): ("-mavx512f", "-mfma"), ("x86_64", 32): ("-mavx2", "-mfma")}

EXPORTS = """\
{
  global: tvmx_*;
  local: *;
};
"""

# The VM finds kernels by symbol. Its loader would put TVM's own thread pool into these three if it saw them.
VM_EXPORTS = """\
{
  global: *;
  local: __TVMBackendParallelLaunch; __TVMBackendAllocWorkspace; __TVMBackendFreeWorkspace;
};
"""

ACCESS = """
extern __attribute__((visibility("hidden"))) const int64_t tvmx_blob_delta;
extern __attribute__((visibility("hidden"))) const char tvmx_manifest_begin[], tvmx_manifest_end[];

/* The distance is 64 bits wide: parameters may lie more than 2 GB away. */
EXPORT const void* tvmx_params(void) { return (const char*)&tvmx_blob_delta + tvmx_blob_delta; }

EXPORT const char* tvmx_manifest(int64_t* bytes) {
  *bytes = tvmx_manifest_end - tvmx_manifest_begin;
  return tvmx_manifest_begin;
}
"""


@dataclass(frozen=True)
class Toolchain:
    """The C compiler for a target, and what it needs to be told."""

    cc: str
    flags: tuple[str, ...]
    large_section: str  # where parameters lie
    section_type: str

    @classmethod
    def of(cls, target: Target) -> Toolchain:
        """The host's gcc or a cross compiler. Raises CompileError saying what to install."""
        import platform

        host = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
        names = ["gcc", "cc", "clang"] if host == target.arch else [f"{target.arch}-linux-gnu-gcc"]
        cc = os.environ.get("CC") if host == target.arch else None
        found = shutil.which(cc) if cc else next(filter(None, map(shutil.which, names)), None)
        if found is None:
            package = "gcc" if host == target.arch else f"gcc-{target.arch.replace('_', '-')}-linux-gnu"
            raise CompileError(
                f"no C compiler for {target.arch} ({' or '.join(names)}); install one, as with "
                f"`apt-get install {package}`"
            )
        if target.arch == "x86_64":
            return cls(found, (), '.section .lrodata,"al",@progbits', "@progbits")
        return cls(found, (), '.section .rodata.tvmx_params,"a",%progbits', "%progbits")

    def run(self, arguments: Sequence[str], folder: Path) -> None:
        """Run the compiler in `folder`. Raises CompileError with what it printed."""
        done = subprocess.run(
            [self.cc, *self.flags, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            telling = ("error", "undefined", "No space left")
            lines = [l for l in done.stderr.splitlines() if any(t in l for t in telling) and "collect2" not in l]
            raise CompileError(f"{Path(self.cc).name} failed: {'; '.join(lines[:3]) or done.stderr.strip()[-300:]}")


def write_data(
    folder: Path, constants: ConstantPool, manifest: Mapping[str, Any], tools: Toolchain, images: bool = False
) -> None:
    """Write `data.S`: parameters, manifest and the empty seal; with `images`, the device code in `images.bin` too."""
    constants.write(folder / "params.bin")
    (folder / "manifest.json").write_text(json.dumps(manifest, separators=(",", ":")), encoding="utf-8")
    kind = tools.section_type
    (folder / "data.S").write_text(
        f"""{tools.large_section}
.balign 4096
tvmx_blob: .incbin "params.bin"
.section .rodata
.balign 8
.globl tvmx_blob_delta
.hidden tvmx_blob_delta
tvmx_blob_delta: .quad tvmx_blob - tvmx_blob_delta
.section {MANIFEST_SECTION},"a",{kind}
.globl tvmx_manifest_begin, tvmx_manifest_end
.hidden tvmx_manifest_begin, tvmx_manifest_end
tvmx_manifest_begin: .incbin "manifest.json"
tvmx_manifest_end: .byte 0
.section {SEAL_SECTION},"a",{kind}
.balign 8
.globl tvmx_seal
tvmx_seal: .ascii "{SEAL_MAGIC.decode()}"
.zero {SEAL_SIZE - len(SEAL_MAGIC)}
{_images(kind) if images else ""}.section .note.GNU-stack,"",{kind}
"""
    )


def _images(kind: str) -> str:
    return f"""\
.section {CUDA_SECTION},"a",{kind}
.balign 4096
.globl tvmx_images
.hidden tvmx_images
tvmx_images: .incbin "images.bin"
"""


def link_cuda(folder: Path, host: str, tools: Toolchain, output: Path) -> int:
    """Link the library of a CUDA target, as `link` does; it needs libc and nothing of CUDA. Returns its bytes."""
    (folder / "host.c").write_text(host + "#include <stdint.h>\n" + ACCESS)
    (folder / "exports.map").write_text(EXPORTS)
    tools.run([*_C_FLAGS, "-O1", "-c", "host.c", "-o", "host.o"], folder)
    tools.run([*_C_FLAGS, "-O2", "-c", str(HERE / "cuda.c"), "-o", "cuda.o"], folder)
    tools.run(["-c", "data.S", "-o", "data.o"], folder)
    with replacing(output.absolute()) as made:
        tools.run(
            ["-shared", "-o", str(made), "host.o", "cuda.o", "data.o", "-Wl,--version-script=exports.map",
             "-Wl,-z,now", "-Wl,-z,noexecstack", "-Wl,--no-undefined", "-Wl,--build-id=none", "-ldl"],
            folder,
        )  # fmt: skip
        seal(made)
    return output.stat().st_size


def link(
    folder: Path,
    host: str,
    objects: Sequence[Path],
    tools: Toolchain,
    target: Target,
    output: Path,
    tiles: bool = False,
) -> int:
    """Link everything in `folder` to `output`, which is replaced only by a whole, sealed file. Returns its bytes.

    With `tiles`, a pool asks the system for AMX's.
    """
    (folder / "host.c").write_text(PRELUDE + host + ACCESS)
    (folder / "exports.map").write_text(EXPORTS)
    tools.run([*_C_FLAGS, "-O1", "-c", "host.c", "-o", "host.o"], folder)
    compile_pool(folder, tools, tiles=tiles)
    tools.run([*_C_FLAGS, "-O3", *_peak_flags(target), "-c", str(HERE / "peak.c"), "-o", "peak.o"], folder)
    tools.run(["-c", "data.S", "-o", "data.o"], folder)
    with replacing(output.absolute()) as made:
        tools.run(
            ["-shared", "-o", str(made), "host.o", "pool.o", "peak.o", "data.o", *map(str, objects),
             "-Wl,--version-script=exports.map", "-Wl,-z,now", "-Wl,-z,noexecstack", "-Wl,--no-undefined",
             "-Wl,--build-id=none", "-lm", "-lpthread"],
            folder,
        )  # fmt: skip
        seal(made)
    return output.stat().st_size


def _peak_flags(target: Target) -> list[str]:
    """Vector width and dot units for peak.c."""
    flags = [f"-DTVMX_VECTOR={target.vector_bytes}", *_VECTOR_FLAGS.get((target.arch, target.vector_bytes), ())]
    if has_vnni(target):
        prefix = "" if target.vector_bytes == 64 else "{vex} "
        flags.append(f'-DTVMX_INT8_STEP="{prefix}vpdpbusd %2, %2, %0"')
    elif target.arch == "x86_64" and target.vector_bytes > 16:
        flags.append('-DTVMX_INT8_STEP="vpmaddubsw %2, %2, %1; vpmaddwd %1, %2, %1; vpaddd %1, %0, %0"')
    elif target.has("asimddp"):
        flags += ["-march=armv8.2-a+dotprod", '-DTVMX_INT8_STEP="sdot %0.4s, %2.16b, %2.16b"']
    if bf16_unit(target) is not None:
        flags.append('-DTVMX_BF16_STEP="vdpbf16ps %2, %2, %0"')
    return flags


def compile_pool(folder: Path, tools: Toolchain, for_vm: bool = False, tiles: bool = False) -> None:
    """Compile the thread pool to `pool.o`; the VM brings its own error reporting."""
    define = [*(["-DTVMX_FOR_VM"] if for_vm else []), *(["-DTVMX_TILES"] if tiles else [])]
    tools.run([*_C_FLAGS, "-O2", *define, "-c", str(HERE / "pool.c"), "-o", "pool.o"], folder)


@contextlib.contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """A file beside `output` to write; it replaces `output` at the end of a block that raises nothing.

    Whoever looks, and whenever the process dies, sees the old file or the whole new one.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.chmod(0o755)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
