"""Run scheduled GPU kernels on the CPU, from the CUDA source that would be compiled, and catch what breaks them.

`emulate(func, target, arrays)` lowers a scheduled PrimFunc to CUDA source and runs it with the lane layouts of
`ldmatrix`, `mma.sync` and `wmma`, with `cp.async`, barriers and shuffles, every CUDA thread a fiber. It finds
accesses out of bounds or misaligned, races on shared and global memory, reads of shared memory nobody wrote, copies
read before they arrive, and barriers that not all threads reach; and counts bank conflicts of `ldmatrix`.
`run_serial(func, arrays)` runs any scheduled TensorIR, also before tensorisation, with all threads in turn.
"""

from tvmx.debug.emulate.check import KernelCheck, check_kernels
from tvmx.debug.emulate.run import Emulation, KernelFault, compiler, emulate, run_program, run_symbolic
from tvmx.debug.emulate.serial import run_serial

__all__ = [
    "Emulation",
    "KernelCheck",
    "KernelFault",
    "check_kernels",
    "compiler",
    "emulate",
    "run_program",
    "run_serial",
    "run_symbolic",
]
