"""The compiled graph executor: Graph + memory plan + scheduled kernels → one `.so`."""

from tvmx.executor.build import BuildResult, EntryProgram, build_artifact

__all__ = ["BuildResult", "EntryProgram", "build_artifact"]
