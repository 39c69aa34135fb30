"""Post-training quantisation of ONNX models: observers, calibration, placement, and the QDQ model.

Read `quantizer.py` first: it is the stage as a whole. Nothing here imports TVM or runs a model; `tvmx.api_quantize`
hands in a `run` callable. The package is callable: `tvmx.quantize(model, ...)` is `tvmx.api_quantize.quantize`.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from tvmx.quantize.calibrate import Calibration, Run, collect, input_specs, load_calibration, watched
from tvmx.quantize.data import feeds
from tvmx.quantize.images import Preprocess
from tvmx.quantize.model import QuantizedModel
from tvmx.quantize.observers import OBSERVERS
from tvmx.quantize.prepare import prepare_model
from tvmx.quantize.quantizer import Plan, finish, make_plan
from tvmx.quantize.report import QuantReport
from tvmx.quantize.scheme import Override, Scheme, parse_override

__all__ = [
    "OBSERVERS", "Calibration", "Override", "Plan", "Preprocess", "QuantReport", "QuantizedModel", "Run", "Scheme",
    "collect", "feeds", "finish", "input_specs", "load_calibration", "make_plan", "parse_override", "prepare_model",
    "watched",
]  # fmt: skip


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> QuantizedModel:
        from tvmx.api_quantize import quantize as quantize_model

        return quantize_model(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
