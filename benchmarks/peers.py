"""ONNX Runtime and OpenVINO at their best public settings, as callables on fixed inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def onnxruntime_session(model: str | bytes, threads: int) -> Any:
    """An InferenceSession with `threads` intra-op threads, all graph optimizations, sequential."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def onnxruntime_run(model: str | bytes, inputs: Mapping[str, np.ndarray], threads: int) -> Callable[[], Any]:
    """A call that runs the model once and returns its outputs as a list."""
    session = onnxruntime_session(model, threads)
    feed = dict(inputs)
    return lambda: session.run(None, feed)


def openvino_run(
    model: str | bytes, inputs: Mapping[str, np.ndarray], threads: int, precision: str = "f32"
) -> Callable[[], Any] | None:
    """OpenVINO in latency mode with shapes fixed to the inputs; None when it is absent or refuses the model."""
    try:
        import openvino as ov
    except ImportError:
        return None
    try:
        core = ov.Core()
        network = core.read_model(model)
        network.reshape({name: list(array.shape) for name, array in inputs.items()})
        compiled = core.compile_model(
            network,
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": precision,
                "NUM_STREAMS": 1,
            },
        )
        request = compiled.create_infer_request()
        tensors = {name: ov.Tensor(np.ascontiguousarray(array)) for name, array in inputs.items()}
        for name, tensor in tensors.items():
            request.set_tensor(name, tensor)
        request.infer()
    except RuntimeError as error:
        print(f"openvino refuses: {str(error).strip().splitlines()[-1][:120]}")
        return None
    return request.infer
