"""CUDA schedules. Each module registers its rules on import."""

from tvmx_schedules.cuda import gemm, generic

__all__ = ["gemm", "generic"]
