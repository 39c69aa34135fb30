"""Run a compiled model: numpy and the standard library only, neither TVM nor ONNX."""

from tvmx.runtime.executor import Benchmark, GraphExecutor
from tvmx.runtime.manifest import TensorInfo

__all__ = ["Benchmark", "GraphExecutor", "TensorInfo"]
