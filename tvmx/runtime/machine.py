"""The machine that runs a model: architecture and CPU features. (`tvmx.target` is the compiler's and not used here.)"""

from __future__ import annotations

import ctypes
import functools
import os
import platform


@functools.cache
def architecture() -> str:
    """`x86_64`, `aarch64` or what the system calls itself."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@functools.cache
def cpu_features() -> frozenset[str]:
    """Flags of the first CPU in /proc/cpuinfo; empty where that cannot be read."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


TILES = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@functools.cache
def request_tiles() -> str | None:
    """Ask Linux to let this process and its threads use AMX tiles; the reason where it does not, None where it does.

    Without the permission the first use of a tile ends the process by SIGILL.
    """
    if architecture() != "x86_64" or not hasattr(os, "uname") or os.uname().sysname != "Linux":
        return "tiles are a matter of x86-64 Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    return f"arch_prctl(ARCH_REQ_XCOMP_PERM): {os.strerror(ctypes.get_errno())}"


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
