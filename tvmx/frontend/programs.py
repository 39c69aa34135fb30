"""A model with an If on a run-time condition is several programs: one that decides, and one for each branch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto

from tvmx.errors import ModelError, TvmxError
from tvmx.frontend.importer import Prepared, prepare
from tvmx.frontend.model import Model
from tvmx.frontend.rewrite import SplitIf, split_if
from tvmx.frontend.shapes import ShapeSpec

log = logging.getLogger(__name__)

MAX_DEPTH = 6  # 64 programs; a model with more run-time Ifs in a row is refused by the importer


@dataclass(frozen=True)
class Branch:
    """Run `condition` (one bool output, a subset of the inputs), then the program that it chooses.

    One of `then` and `otherwise` may be None: a branch that cannot be a program at the given shapes, for `reason`.
    """

    node: str
    condition: Model
    then: Model | Branch | None
    otherwise: Model | Branch | None
    reason: str = ""


def import_programs(
    model: str | Path | bytes | ModelProto,
    shapes: ShapeSpec | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Model | Branch:
    """`import_onnx`, but an If that only the run can decide becomes a Branch instead of a ModelError."""
    return _programs(prepare(model, shapes, constants), MAX_DEPTH)


def _split(prepared: Prepared) -> SplitIf | None:
    try:
        return split_if(prepared.proto)
    except TvmxError:
        raise
    except Exception as error:  # rules look at nodes that the checker lets pass
        log.debug("splitting at an If failed", exc_info=True)
        raise ModelError(f"{prepared.name}: an If cannot be split into programs: {error}") from error


def _programs(prepared: Prepared, depth: int) -> Model | Branch:
    has_if = any(n.op_type == "If" for n in prepared.proto.graph.node)
    split = _split(prepared) if depth and has_if else None
    if split is None:
        return prepared.convert()
    parts: list[Model | Branch | None] = []
    refusals: list[ModelError] = []
    for program in (split.then, split.otherwise):
        try:
            parts.append(_programs(prepared.part(program), depth - 1))
        except ModelError as error:
            parts.append(None)
            refusals.append(error)
    if len(refusals) == 2:
        raise refusals[0]
    reason = str(refusals[0]) if refusals else ""
    if reason:
        side = "then" if parts[0] is None else "else"
        log.warning("%s: the %s branch of If %r is left out: %s", prepared.name, side, split.node, reason)
    return Branch(split.node, prepared.part(split.condition).convert(), parts[0], parts[1], reason)
