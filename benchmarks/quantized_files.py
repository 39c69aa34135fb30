"""The zoo as ONNX Runtime's own tools quantise it: every format, granularity and activation type, and dynamically."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import Inputs, ZooModel, cache_dir


class NotMade(RuntimeError):
    """ONNX Runtime's tool refuses this model in this variant; the message is what it said."""


@dataclass(frozen=True)
class Variant:
    """One way to call the tool. `form` is "qdq", "qoperator" or "dynamic"."""

    form: str
    per_channel: bool
    activations: str = "u8"  # "u8" | "s8"; dynamic quantisation has u8 alone
    weights: str = "s8"

    @property
    def name(self) -> str:
        granularity = "channel" if self.per_channel else "tensor"
        return f"{self.form}-{granularity}-{self.activations}{self.weights}"


VARIANTS: tuple[Variant, ...] = (
    *(Variant(f, c, a) for f in ("qdq", "qoperator") for c in (False, True) for a in ("u8", "s8")),
    Variant("dynamic", False),
    Variant("dynamic", True),
    Variant("dynamic", False, weights="u8"),
)


def calibration(model: ZooModel, count: int = 4) -> list[Inputs]:
    """A few inputs at the measured shapes, real ones first."""
    rng = np.random.default_rng(0)
    real = [inputs for _, inputs in model.real_inputs()] if model.real_inputs else []
    fixed = [f for f in real if all(f[k].shape == tuple(s) for k, s in model.shapes.items())]
    return [*fixed[: count - 1], *(model.random_inputs(rng) for _ in range(count - len(fixed[: count - 1])))]


def quantized_file(model: ZooModel, variant: Variant) -> Path:
    """The quantised model, made once and kept beside the float ones. Raises NotMade."""
    path = cache_dir() / "quantized" / f"{model.name}-{variant.name}.onnx"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        made = Path(folder) / "made.onnx"
        _prepare(model, prepared)
        try:
            _quantize(variant, prepared, made, [{**f, **model.constants} for f in calibration(model)])
        except Exception as error:  # whatever its Python raises
            text = (str(error).strip().splitlines() or [""])[-1][:120]
            raise NotMade(f"{type(error).__name__}: {text}") from error
        made.replace(path) if made.stat().st_dev == path.parent.stat().st_dev else _copy(made, path)
    return path


def _copy(source: Path, path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(source.read_bytes())
    part.replace(path)


def _prepare(model: ZooModel, path: Path) -> None:
    """Shapes inferred, constants folded, opset 13 at least: scales per channel need it."""
    import onnx
    from onnx import version_converter
    from onnxruntime.quantization.shape_inference import quant_pre_process

    proto = onnx.load(model.path)
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    onnx.save(version_converter.convert_version(proto, 13) if opset < 13 else proto, path)
    quant_pre_process(str(path), str(path), skip_symbolic_shape=True)


def _quantize(variant: Variant, prepared: Path, made: Path, feeds: Sequence[Inputs]) -> None:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )

    types = {"u8": QuantType.QUInt8, "s8": QuantType.QInt8}
    if variant.form == "dynamic":
        quantize_dynamic(prepared, made, per_channel=variant.per_channel, weight_type=types[variant.weights])
        return

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: Iterator[Inputs] = iter(feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    quantize_static(
        prepared,
        made,
        Reader(),
        quant_format=QuantFormat.QDQ if variant.form == "qdq" else QuantFormat.QOperator,
        per_channel=variant.per_channel,
        activation_type=types[variant.activations],
        weight_type=types[variant.weights],
    )
