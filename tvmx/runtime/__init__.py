"""Run a compiled model: numpy and the standard library only, neither TVM nor ONNX."""

from tvmx.runtime.executor import Benchmark, GraphExecutor
from tvmx.runtime.manifest import TensorInfo
from tvmx.runtime.pipeline import Pipeline
from tvmx.runtime.profile import Profile

__all__ = ["Benchmark", "GraphExecutor", "Pipeline", "Profile", "TensorInfo"]
