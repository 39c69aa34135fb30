"""CPU schedules. Each module registers its rules on import."""

from tvmx_schedules.cpu import conv, depthwise, generic, intrinsics, matmul, winograd

intrinsics.install()

__all__ = ["conv", "depthwise", "generic", "intrinsics", "matmul", "winograd"]
