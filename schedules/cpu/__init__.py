"""CPU schedules. Each module registers its rules on import."""

from tvmx_schedules.cpu import conv, depthwise, generic, intrinsics, winograd

intrinsics.install()

__all__ = ["conv", "depthwise", "generic", "intrinsics", "winograd"]
