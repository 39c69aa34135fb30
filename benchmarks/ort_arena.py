"""What ONNX Runtime's CPU arena takes for a model, read from its log in a process of its own.

Two settings: the default one, and the tightest public one (the arena grows by what is asked for and is emptied after
the first run, so that the second run's growth is its planned block, the outputs, and scratch of kernels).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

_CODE = """
import sys
import numpy as np
import onnxruntime as ort
ort.set_default_logger_severity(0)
ort.set_default_logger_verbosity(10)
path, inputs, tight = sys.argv[1], dict(np.load(sys.argv[2])), sys.argv[3] == "tight"
options, run = ort.SessionOptions(), ort.RunOptions()
options.intra_op_num_threads = 1
if tight:
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(info, ort.OrtArenaCfg({"arena_extend_strategy": 1}))
    options.add_session_config_entry("session.use_env_allocators", "1")
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
for mark in ("FIRST", "SECOND", "THIRD"):
    print(mark, file=sys.stderr, flush=True)
    outputs = session.run(None, inputs, run if mark == "FIRST" else None)
    total = sum(np.asarray(o).nbytes for o in outputs)
    del outputs
print("OUTPUTS", total, file=sys.stderr)
"""
_GROWN = re.compile(r"Extended allocation by (\d+) bytes")


def ort_arena(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Bytes without outputs: `default` is what the arena grew by over three runs, `tight` what the second run needs."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "inputs.npz"
        np.savez(file, **inputs)  # type: ignore[arg-type]
        for setting in ("default", "tight"):
            command = [sys.executable, "-c", _CODE, str(path), str(file), setting]
            log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
            outputs = int(log.rsplit("OUTPUTS ", 1)[1].split()[0])
            first, second = log.split("FIRST\n", 1)[1].split("SECOND\n", 1)
            second, third = second.split("THIRD\n", 1)
            runs = first + second + third if setting == "default" else second
            found[setting] = max(0, sum(map(int, _GROWN.findall(runs))) - outputs)
    return found
