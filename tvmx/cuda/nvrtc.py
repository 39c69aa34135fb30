"""CUDA source → cubin with NVRTC, from the toolkit or from the wheels nvidia-cuda-nvrtc, -runtime and -crt."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import CompileError

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "mma.h", "crt/mma.h")
# What TVM's source includes and the wheels above lack (they are CCCL's).
_CSTDINT = """#pragma once
typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t;
typedef unsigned short uint16_t; typedef int int32_t; typedef unsigned int uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
namespace cuda { namespace std { using ::int8_t; using ::uint8_t; using ::int16_t; using ::uint16_t; using ::int32_t;
using ::uint32_t; using ::int64_t; using ::uint64_t; } }
"""
_TYPE_TRAITS = """#pragma once
namespace cuda { namespace std {
template <bool v> struct bool_constant { static constexpr bool value = v; };
template <class A, class B> struct is_same : bool_constant<false> {};
template <class A> struct is_same<A, A> : bool_constant<true> {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <class T, class... U> struct any_of : bool_constant<(is_same_v<T, U> || ...)> {};
template <class T> struct is_floating_point : any_of<T, float, double> {};
template <class T> struct is_integral : any_of<T, bool, char, signed char, unsigned char, short, unsigned short, int,
  unsigned, long, unsigned long, long long, unsigned long long> {};
template <class T> struct is_signed : bool_constant<(T(-1) < T(0))> {};
template <class T> struct is_unsigned : bool_constant<(is_integral<T>::value && T(0) < T(-1))> {};
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool, class A, class B> struct conditional { typedef A type; };
template <class A, class B> struct conditional<false, A, B> { typedef B type; };
} }
"""
_INCLUDED = {"cuda/std/cstdint": _CSTDINT, "cuda/std/type_traits": _TYPE_TRAITS}


@dataclass(frozen=True)
class Nvrtc:
    """The loaded library, its version, and the folder with CUDA's headers."""

    library: Any
    version: tuple[int, int]
    include: Path


@functools.cache
def nvrtc() -> Nvrtc | None:
    """NVRTC with its headers; None where either is missing."""
    include = next((f for f in _folders("include") if all((f / h).is_file() for h in HEADERS)), None)
    if include is None:
        return None
    paths = [str(f / name) for f in _folders("lib", "lib64") for name in LIBRARIES if (f / name).is_file()]
    for path in (*paths, *LIBRARIES):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return Nvrtc(library, (major.value, minor.value), include)
    return None


def _folders(*names: str) -> Iterator[Path]:
    """Where the toolkit's and the wheels' folders of these names lie."""
    roots = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        roots += sorted(p for p in Path(place).iterdir() if p.is_dir())
    for root in (*roots, Path("/usr/local/cuda")):
        for name in names:
            if (root / name).is_dir():
                yield root / name


def compile_with(found: Nvrtc, source: str, arch: str, name: str) -> tuple[bytes, str]:
    """(code, what ptxas said): a cubin for "sm_80", PTX for "compute_80". Raises CompileError with the first error."""
    library = found.library
    program = ctypes.c_void_p()
    count = len(_INCLUDED)
    contents = (ctypes.c_char_p * count)(*(t.encode() for t in _INCLUDED.values()))
    names = (ctypes.c_char_p * count)(*(n.encode() for n in _INCLUDED))
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", count, contents, names
    )  # fmt: skip
    _check(library, made)
    try:
        options = [f"--gpu-architecture={arch}", "--std=c++17", f"-I{found.include}", "--ptxas-options=--verbose"]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = library.nvrtcCompileProgram(program, len(options), array)
        log = _text(library, program, "ProgramLog").decode(errors="replace")
        if status:
            lines = [l for l in log.splitlines() if "error" in l] or log.splitlines()
            raise CompileError(f"{name}: NVRTC for {arch} says: {lines[0] if lines else status}")
        return _text(library, program, "CUBIN" if arch.startswith("sm_") else "PTX"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: Any, program: Any, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(max(1, size.value))
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw if what == "CUBIN" else buffer.value


def _check(library: Any, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {library.nvrtcGetErrorString(status).decode(errors='replace')}")
