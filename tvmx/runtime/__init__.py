"""Run a compiled model: numpy and the standard library only, neither TVM nor ONNX."""

from tvmx.runtime.cuda_executor import CudaExecutor, open_executor
from tvmx.runtime.device import DeviceArray
from tvmx.runtime.executor import Benchmark, GraphExecutor
from tvmx.runtime.manifest import TensorInfo
from tvmx.runtime.pipeline import Pipeline
from tvmx.runtime.profile import Profile

__all__ = [
    "Benchmark",
    "CudaExecutor",
    "DeviceArray",
    "GraphExecutor",
    "Pipeline",
    "Profile",
    "TensorInfo",
    "open_executor",
]
