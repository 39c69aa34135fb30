"""CUDA schedules. Each module registers its rules on import."""

from tvmx_schedules.cuda import gemm, generic, wgmma

__all__ = ["gemm", "generic", "wgmma"]
