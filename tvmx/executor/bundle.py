"""A folder with everything that a compiled model needs elsewhere: library, header, C++ and Python examples."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tvmx.errors import ArtifactError, ConfigError
from tvmx.runtime.artifact import Artifact, read_artifact
from tvmx.runtime.manifest import Entry, TensorInfo

_EXECUTOR = Path(__file__).parent
_PACKAGE = _EXECUTOR.parent
_FILES = _EXECUTOR / "bundle_files"
_FFI_LEFT_OUT = shutil.ignore_patterns("include", "cython", "src", "3rdparty", "stub", "cmake", "__pycache__")


@dataclass(frozen=True)
class Bundle:
    """What was written. `cpp` is False where C and C++ cannot run the model, for the reason in the README."""

    folder: Path
    files: tuple[Path, ...]
    bytes: int
    parameter_bytes: int
    cpp: bool


def write_bundle(artifact: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Bundle:
    """Write the bundle of a compiled model into `folder`, which must be empty or absent.

    Raises ArtifactError for a damaged file and ConfigError for a folder that is in use.
    """
    read = read_artifact(artifact)
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty; give a new folder for the bundle")
    library = Path(read.path).name
    cpp = _cpp_obstacle(read) is None
    _copy([Path(read.path)], target / "lib")
    _write_python(read, target / "python", library)
    if read.manifest.executor == "vm":
        _copy_vm_runtime(target)
    if read.manifest.executor == "cuda":
        _copy([_EXECUTOR / "tvmx_cuda.h"], target / "include")
    if cpp:
        _copy([_EXECUTOR / "tvmx_abi.h"], target / "include")
        (target / "include" / "tvmx_model.h").write_text(model_header(read), encoding="utf-8")
        _copy([_FILES / "main.cpp"], target / "cpp")
        _fill(_FILES / "CMakeLists.txt", target / "cpp" / "CMakeLists.txt", library)
    (target / "README.md").write_text(_readme(read, library), encoding="utf-8")
    files = tuple(sorted(p for p in target.rglob("*") if p.is_file()))
    return Bundle(target, files, sum(f.stat().st_size for f in files), read.manifest.parameter_bytes, cpp)


def model_header(artifact: Artifact) -> str:
    """`tvmx_model.h`: the entries with their tensors and the bytes of their arena."""
    parts = [
        f"/* {Path(artifact.path).name}, compiled for {artifact.manifest.target}. Made by tvmx; do not edit. */",
        "#ifndef TVMX_MODEL_H_",
        "#define TVMX_MODEL_H_",
        "",
        '#include "tvmx_abi.h"',
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        "typedef struct {",
        "  const char* name;",
        "  const char* dtype;",
        "  int rank;",
        "  int64_t shape[8];",
        "  int64_t bytes;",
        "} tvmx_tensor_info;",
        "",
        "typedef struct {",
        "  const char* name;",
        "  tvmx_run_fn run;",
        "  int num_inputs;",
        "  const tvmx_tensor_info* inputs;",
        "  int num_outputs;",
        "  const tvmx_tensor_info* outputs;",
        "  int64_t arena_bytes;",
        "} tvmx_entry;",
        "",
    ]
    rows = []
    for name, entry in artifact.manifest.entries.items():
        parts.append(f"int tvmx_run_{name}(const tvmx_call*);")
        parts.append(_tensor_table(f"TVMX_INPUTS_{name}", entry, entry.inputs, [i.name for i in entry.inputs]))
        parts.append(_tensor_table(f"TVMX_OUTPUTS_{name}", entry, entry.outputs, list(entry.output_tensors)))
        rows.append(
            f"  {{{_c(name)}, tvmx_run_{name}, {len(entry.inputs)}, TVMX_INPUTS_{name}, "
            f"{len(entry.outputs)}, TVMX_OUTPUTS_{name}, {entry.arena.bytes or 0}}},"
        )
    parts += ["static const tvmx_entry TVMX_ENTRIES[] = {", *rows, "};", ""]
    parts += ["#ifdef __cplusplus", "}", "#endif", "#endif", ""]
    return "\n".join(parts)


def _tensor_table(name: str, entry: Entry, infos: Iterable[TensorInfo], tensors: list[str]) -> str:
    rows = [
        f"  {{{_c(i.name)}, {_c(i.dtype)}, {len(i.shape)}, "
        f"{{{', '.join(map(str, i.shape)) or '0'}}}, {entry.tensors[t].bytes}}},"
        for i, t in zip(infos, tensors)
    ]
    return "\n".join([f"static const tvmx_tensor_info {name}[] = {{", *(rows or ["  {0},"]), "};"])


def _c(text: str) -> str:
    """A C string literal; JSON's escapes are C's for everything that a name may hold once it is ASCII."""
    return json.dumps(text.encode("unicode_escape").decode("ascii"))


def _cpp_obstacle(artifact: Artifact) -> str | None:
    """Why plain C cannot run the model, or None."""
    manifest = artifact.manifest
    if manifest.executor == "vm":
        return "it runs through the Relax VM"
    if manifest.executor == "cuda":
        return "it runs on a GPU, and include/tvmx_cuda.h is its C interface"
    if manifest.branches:
        return "it chooses between programs while running"
    for entry in manifest.entries.values():
        for info in (*entry.inputs, *entry.outputs):
            if any(isinstance(d, str) for d in info.shape):
                return (
                    "its shapes are symbolic, and memory for a shape is planned by the Python runtime; "
                    "compile it with fixed shapes"
                )
            if len(info.shape) > 8:
                return "it has a tensor of more than 8 dimensions"
    return None


def _write_python(artifact: Artifact, folder: Path, library: str) -> None:
    """The runtime as a package of its own: no compiler, and the planner only where shapes are symbolic."""
    package = folder / "tvmx"
    _copy([_PACKAGE / "__init__.py", _PACKAGE / "errors.py", _PACKAGE / "py.typed"], package)
    _copy((_PACKAGE / "runtime").glob("*.py"), package / "runtime")
    entries = artifact.manifest.entries.values()
    if any(e.arena.bytes is None or any(isinstance(d, str) for i in e.inputs for d in i.shape) for e in entries):
        _copy((_PACKAGE / "memory").glob("*.py"), package / "memory")
    _fill(_FILES / "run_model.py", folder / "run_model.py", library)


def _copy_vm_runtime(target: Path) -> None:
    """TVM's runtime libraries and the ffi package, without headers and tests."""
    import importlib.util

    tvm, ffi = importlib.util.find_spec("tvm"), importlib.util.find_spec("tvm_ffi")
    if tvm is None or ffi is None or not tvm.origin or not ffi.origin:
        raise ArtifactError("this model runs through the Relax VM; install apache-tvm to bundle its runtime")
    libraries = Path(tvm.origin).parent / "lib"
    _copy([libraries / "libtvm_runtime.so", libraries / "libtvm_runtime_extra.so"], target / "lib")
    shutil.copytree(Path(ffi.origin).parent, target / "python" / "tvm_ffi", ignore=_FFI_LEFT_OUT)


def _copy(sources: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if source.exists():
            shutil.copy2(source, folder / source.name)


def _fill(template: Path, target: Path, library: str) -> None:
    target.write_text(template.read_text(encoding="utf-8").replace("@LIBRARY@", library), encoding="utf-8")


def _readme(artifact: Artifact, library: str) -> str:
    manifest = artifact.manifest
    obstacle = _cpp_obstacle(artifact)
    lines = [
        f"# {library}",
        "",
        f"Compiled by tvmx {manifest.tvmx} for {manifest.target} ({manifest.arch}"
        + (f"; needs {', '.join(sorted(manifest.features))}" if manifest.features else "")
        + ").",
        "",
        "| path | what |",
        "|---|---|",
        f"| lib/{library} | the model: kernels, parameters, thread pool; needs libc, libm and pthreads only |"
        if manifest.executor == "graph"
        else f"| lib/{library} | the model: machine code for the GPU, parameters; needs libc and an NVIDIA driver |"
        if manifest.executor == "cuda"
        else f"| lib/ | the model and TVM's runtime, which its virtual machine needs ({manifest.reason}) |",
        "| python/run_model.py | run it from Python with numpy: `python python/run_model.py [input.npy ...]` |",
        "| python/tvmx/ | the runtime that the loader imports; put python/ on PYTHONPATH to use it |",
    ]
    if obstacle is None:
        lines += [
            "| include/ | C interface (tvmx_abi.h) and this model's tensors (tvmx_model.h) |",
            "| cpp/ | a C++ example: `cmake -S cpp -B build && cmake --build build && build/run_model` |",
        ]
    else:
        lines += ["", f"There is no C++ example: {obstacle}."]
    for name, entry in manifest.entries.items():
        lines += ["", f"Entry `{name}`:", ""]
        lines += [f"- input `{i.name}`: {i.dtype} {list(i.shape)}" for i in entry.inputs]
        lines += [f"- output `{o.name}`: {o.dtype} {list(o.shape)}" for o in entry.outputs]
    return "\n".join([*lines, ""])
