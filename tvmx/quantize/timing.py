"""Times of single layers in float32 and in int8, measured: what `cost.measured` decides by.

All layers of a model become branches of two programs, one in float32 and one in QDQ form; each is compiled and profiled
once. Times are kept in a JSON Lines file by operator, shapes and machine, so that a layer is measured once a machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from tvmx.errors import ConfigError
from tvmx.quantize.graph import OnnxGraph

Profile = Callable[[ModelProto], "list[float]"]
"""Compiles a program and returns the seconds of each of its products and convolutions, in program order."""

VERSION = 1
ATTRIBUTES = ("strides", "pads", "dilations", "group", "output_padding", "transA", "transB", "auto_pad")


@dataclass(frozen=True)
class Case:
    """A heavy operator apart from its model: what its time depends on."""

    op: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    constant: bool  # the second operand
    attributes: tuple[tuple[str, Any], ...]
    weight_limit: int

    @property
    def key(self) -> str:
        return json.dumps([self.op, self.x, self.w, self.constant, self.attributes, self.weight_limit])


def case_of(graph: OnnxGraph, node: NodeProto, weight_limit: int) -> Case | None:
    """None where a shape is not known, or the first operand is the constant."""
    shapes = [graph.shape(name) for name in (*node.input[:2], node.output[0])]
    if any(s is None or not all(isinstance(d, int) and d > 0 for d in s) for s in shapes):
        return None
    if graph.is_constant(node.input[0]):
        return None
    x, w, y = (tuple(int(d) for d in s or ()) for s in shapes)
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name in ATTRIBUTES}
    attributes = tuple(sorted((k, _plain(v)) for k, v in given.items()))
    return Case(node.op_type, x, w, y, graph.is_constant(node.input[1]), attributes, weight_limit)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return tuple(value) if not isinstance(value, int | float) else value


def programs(cases: Sequence[Case]) -> tuple[ModelProto, ModelProto]:
    """(float, QDQ) models with a branch for each case, its inputs and results in float32 or in uint8."""
    return _program(cases, integer=False), _program(cases, integer=True)


def _program(cases: Sequence[Case], integer: bool) -> ModelProto:
    rng = np.random.default_rng(0)
    nodes, inputs, outputs, constants = [], [], [], {}
    kind = 2 if integer else 1

    def operand(name: str, shape: tuple[int, ...], dtype: int) -> str:
        inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        if not integer:
            return name
        scale, zero = f"{name}_s", f"{name}_z"
        constants[scale] = np.float32(0.05)
        constants[zero] = np.zeros((), np.uint8 if dtype == 2 else np.int8)
        nodes.append(helper.make_node("DequantizeLinear", [name, scale, zero], [f"{name}_f"]))
        return f"{name}_f"

    for k, case in enumerate(cases):
        x = operand(f"x{k}", case.x, kind)
        if case.constant:
            codes = rng.integers(-case.weight_limit, case.weight_limit + 1, case.w).astype(np.int8)
            w = f"w{k}"
            if integer:
                constants |= {f"{w}_q": codes, f"{w}_s": np.float32(0.01), f"{w}_z": np.zeros((), np.int8)}
                nodes.append(helper.make_node("DequantizeLinear", [f"{w}_q", f"{w}_s", f"{w}_z"], [w]))
            else:
                constants[w] = codes.astype(np.float32) * np.float32(0.01)
        else:
            w = operand(f"w{k}", case.w, 3 if integer else 1)
        nodes.append(helper.make_node(case.op, [x, w], [f"r{k}"], **dict(case.attributes)))
        out = f"r{k}"
        if integer:
            constants |= {f"y{k}_s": np.float32(0.1), f"y{k}_z": np.zeros((), np.uint8)}
            nodes.append(helper.make_node("QuantizeLinear", [out, f"y{k}_s", f"y{k}_z"], [f"y{k}"]))
            out = f"y{k}"
        outputs.append(helper.make_tensor_value_info(out, kind, case.y))
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "layers", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def measure_cases(cases: Iterable[Case], profile: Profile, log: Path | None, machine: str) -> dict[str, Any]:
    """Seconds (float, int8) by `Case.key`; cases in `log` are not measured again, new ones are appended.

    A case whose programs do not fall into one kernel a layer is left out.
    """
    known = _read(log, machine) if log is not None else {}
    missing = list({c.key: c for c in cases if c.key not in known}.values())
    if not missing:
        return known
    times = [profile(program) for program in programs(missing)]
    if any(len(t) != len(missing) for t in times):
        return known
    fresh = {c.key: (wide, narrow) for c, wide, narrow in zip(missing, *times, strict=True)}
    if log is not None:
        _append(log, machine, fresh)
    return {**known, **fresh}


def _read(log: Path, machine: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        text = log.read_text(encoding="utf-8")
    except FileNotFoundError:
        return found
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the layer times in {log}: {error}") from None
    for line in text.splitlines():
        try:
            record = json.loads(line)
            if record["version"] == VERSION and record["machine"] == machine:
                wide, narrow = (float(v) for v in record["seconds"])
                found[str(record["case"])] = (wide, narrow)
        except (ValueError, KeyError, TypeError):
            continue  # a torn or foreign line costs one measurement
    return found


def _append(log: Path, machine: str, times: dict[str, tuple[float, float]]) -> None:
    lines = [
        json.dumps({"version": VERSION, "machine": machine, "case": key, "seconds": list(pair)})
        for key, pair in times.items()
    ]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"cannot write the layer times to {log}: {error}") from None
