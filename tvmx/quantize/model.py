"""The result of quantising: an ONNX model in QDQ form and the report of how it came about."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from tvmx.errors import ConfigError
from tvmx.quantize.report import QuantReport

KEPT_KEY = "tvmx.kept_in_float"  # metadata: what the quantiser left in float, so that `tvmx explain` can say why


def with_kept(proto: ModelProto, kept: Iterable[tuple[str, str, str]]) -> ModelProto:
    """`proto`, in whose metadata (name, operator, reason) of each operator left in float now stand."""
    others = [p for p in proto.metadata_props if p.key != KEPT_KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(others)
    proto.metadata_props.add(key=KEPT_KEY, value=json.dumps([list(k) for k in kept]))
    return proto


def kept_in_float(proto: ModelProto) -> tuple[tuple[str, str, str], ...]:
    """What `with_kept` wrote; nothing for a model that another tool quantised."""
    found = next((p.value for p in proto.metadata_props if p.key == KEPT_KEY), "[]")
    try:
        rows = json.loads(found)
        return tuple((str(name), str(op), str(reason)) for name, op, reason in rows)
    except (ValueError, TypeError):
        return ()


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
