"""Calibration: run the model on real inputs and keep what the observers need of each tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from tvmx.errors import ConfigError
from tvmx.quantize.data import Feed, InputSpec
from tvmx.quantize.graph import Array, OnnxGraph
from tvmx.quantize.moments import MomentCollector, Moments
from tvmx.quantize.stats import TensorStats

# Runs the program once; the arrays it returns may be overwritten by the next run.
Run = Callable[[Feed], Mapping[str, Array]]

FORMAT = "tvmx-calibration"
VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """Statistics of every tensor that was watched, from `samples` runs. `alias`: tensors known through another."""

    stats: dict[str, TensorStats]
    samples: int
    alias: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, Array] = field(default_factory=dict)  # what the model was balanced by, see balance.py
    moments: dict[str, Moments] = field(default_factory=dict)  # by layer, see moments.py; not saved

    def of(self, name: str) -> TensorStats:
        """The statistics of a tensor. Raises ConfigError when it was not watched."""
        known = self.stats.get(name) or self.stats.get(self.alias.get(name, ""))
        if known is None:
            raise ConfigError(f"the calibration holds nothing about tensor {name!r}; calibrate this model again")
        return known

    def save(self, path: str | Path) -> None:
        """Write the statistics as JSON, atomically."""
        from tvmx.report.files import write_text

        document = {
            "format": FORMAT,
            "version": VERSION,
            "samples": self.samples,
            "alias": self.alias,
            "peaks": {name: peak.astype(float).tolist() for name, peak in self.peaks.items()},
            "tensors": {name: stats.to_json() for name, stats in self.stats.items()},
        }
        write_text(Path(path), json.dumps(document) + "\n")


def load_calibration(path: str | Path) -> Calibration:
    """Read what `Calibration.save` wrote. Raises ConfigError."""
    try:
        document: Any = json.loads(Path(path).read_text())
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ConfigError(f"{path}: calibration format {document['format']} {document['version']} is not known")
        stats = {str(k): TensorStats.from_json(v) for k, v in document["tensors"].items()}
        peaks = {str(k): np.array(v, np.float64) for k, v in document["peaks"].items()}
        alias = {str(k): str(v) for k, v in document["alias"].items()}
        return Calibration(stats, int(document["samples"]), alias, peaks)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as err:
        raise ConfigError(f"{path}: not a calibration file of tvmx ({err})") from None


def collect(
    run: Run,
    data: Iterable[Feed],
    outputs: Mapping[str, str],
    alias: Mapping[str, str] | None = None,
    moments: MomentCollector | None = None,
) -> Calibration:
    """Stream `data` through `run` and update the statistics of tensors (inputs of the model included).

    `outputs`: tensor → output of `run` that shows it, see `watched`. Memory does not depend on how much data there
    is. Raises ConfigError when there is none.
    """
    stats = {name: TensorStats() for name in outputs}
    samples = 0
    for feed in data:
        made = run(feed)
        for name, entry in stats.items():
            values = feed[name] if name in feed else made[outputs[name]]
            entry.update(values)
            if moments is not None:
                moments.update(name, values, outputs[name] != name)
        samples += 1
        if moments is not None:
            moments.runs += 1
    if not samples:
        raise ConfigError("the calibration data is empty; give at least one sample, better a hundred")
    return Calibration(stats, samples, dict(alias or {}), moments=moments.finish() if moments is not None else {})


@dataclass(frozen=True)
class Watched:
    """A model that shows intermediate tensors; `outputs`: tensor → the output that holds its elements, in any order."""

    model: ModelProto
    outputs: dict[str, str]


def watched(graph: OnnxGraph, tensors: Iterable[str]) -> Watched:
    """The model with `tensors` as further float outputs, for a run that shows them.

    Images are shown channels last, as the kernels hold them: the order of elements does not matter to statistics,
    and a transpose to channels first would cost as much as a layer.
    """
    model = ModelProto()
    model.CopyFrom(graph.proto)
    present = {o.name for o in model.graph.output} | {i.name for i in model.graph.input}
    outputs = {}
    for name in tensors:
        outputs[name] = name
        if name in present:
            continue
        shape = graph.shape(name) or ()
        if len(shape) == 4:
            outputs[name] = f"{name}_channels_last"
            shape = tuple(shape[k] for k in (0, 2, 3, 1))
            transpose = helper.make_node("Transpose", [name], [outputs[name]], outputs[name], perm=[0, 2, 3, 1])
            model.graph.node.append(transpose)
        model.graph.output.append(helper.make_tensor_value_info(outputs[name], TensorProto.FLOAT, shape))
    return Watched(model, outputs)


def input_specs(graph: OnnxGraph) -> tuple[InputSpec, ...]:
    """The model's inputs; a dim that is no number is open."""
    specs = []
    for name in graph.inputs:
        known = graph.types[name]
        dims = tuple(d if isinstance(d, int) else None for d in known.shape or ())
        specs.append(InputSpec(name, dims, np.dtype(helper.tensor_dtype_to_np_dtype(known.elem))))
    return tuple(specs)
