"""The machine that runs a model: architecture and CPU features. (`tvmx.target` is the compiler's and not used here.)"""

from __future__ import annotations

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


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
