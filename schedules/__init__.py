"""TensorIR schedules and intrinsics, one file per operator family and target. Importing registers them."""

from tvmx_schedules import cpu, cuda

__all__ = ["cpu", "cuda"]
