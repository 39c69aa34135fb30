"""A model with an If on a run-time condition is several programs: one that decides, and one for each branch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto

from tvmx.config import Dim
from tvmx.frontend.expand import expand_functions
from tvmx.frontend.fold import fold
from tvmx.frontend.importer import Importer, load_families
from tvmx.frontend.importer import _rewrite as rewrite
from tvmx.frontend.load import load_model
from tvmx.frontend.model import Model
from tvmx.frontend.shapes import InputSpec, ShapeSpec, bind_constants, settle_shapes

MAX_DEPTH = 6  # 64 programs; a model with more run-time Ifs in a row is refused by the importer


@dataclass(frozen=True)
class Branch:
    """Run `condition` (one bool output, a subset of the inputs), then the program that it chooses."""

    node: str
    condition: Model
    then: Model | Branch
    otherwise: Model | Branch


def import_programs(
    model: str | Path | bytes | ModelProto,
    shapes: ShapeSpec | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Model | Branch:
    """`import_onnx`, but an If that only the run can decide becomes a Branch instead of a ModelError."""
    proto, name = load_model(model)
    bind_constants(proto, constants or {}, name)
    specs, bounds = settle_shapes(proto, shapes or {}, name)
    load_families()
    return _programs(fold(expand_functions(proto, name), name), name, specs, bounds, MAX_DEPTH)


def _programs(
    proto: ModelProto, name: str, specs: list[InputSpec], bounds: dict[str, Dim], depth: int
) -> Model | Branch:
    from tvmx.frontend.rewrite import split_if

    def one(program: ModelProto) -> Model:
        kept = {i.name for i in program.graph.input}
        return Importer(rewrite(program, name), name, [s for s in specs if s.name in kept], bounds).run()

    split = split_if(proto) if depth and any(n.op_type == "If" for n in proto.graph.node) else None
    if split is None:
        return one(proto)
    return Branch(
        split.node,
        one(split.condition),
        _programs(fold(split.then, name), name, specs, bounds, depth - 1),
        _programs(fold(split.otherwise, name), name, specs, bounds, depth - 1),
    )
