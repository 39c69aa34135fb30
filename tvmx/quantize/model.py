"""The result of quantising: an ONNX model in QDQ form and the report of how it came about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from tvmx.errors import ConfigError
from tvmx.quantize.report import QuantReport


@dataclass(frozen=True)
class QuantizedModel:
    """`proto` is standard ONNX (QDQ); `tvmx.compile(model, "m.so")` takes the whole object."""

    proto: ModelProto
    name: str
    report: QuantReport

    def save(self, path: str | Path) -> Path:
        """Write the QDQ model to an .onnx file, atomically. Raises ConfigError for another suffix."""
        from tvmx.report.files import atomic_write

        path = Path(path)
        if path.suffix != ".onnx":
            raise ConfigError(f"{path}: save writes .onnx files; tvmx.compile(model, {str(path)!r}) makes a .so")
        with atomic_write(path) as file:
            file.write(self.proto.SerializeToString())
        return path

    def __str__(self) -> str:
        return str(self.report)
