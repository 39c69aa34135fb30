"""CPU schedules. Each module registers its rules on import."""

from tvmx_schedules.cpu import (
    conv,
    depthwise,
    dot,
    dot_intrinsics,
    generic,
    intrinsics,
    matmul,
    weight_only,
    winograd,
)

intrinsics.install()
dot_intrinsics.install()

__all__ = [
    "conv",
    "depthwise",
    "dot",
    "dot_intrinsics",
    "generic",
    "intrinsics",
    "lookup",
    "matmul",
    "weight_only",
    "winograd",
]
