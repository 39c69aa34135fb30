"""What calibration saw, as the `[ranges]` of precision rules: the largest magnitude of a node's result, by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from onnx import NodeProto

from tvmx.frontend.names import names_of
from tvmx.precision.rules import PrecisionRules


def observed_ranges(nodes: Iterable[NodeProto], calibration: Any) -> dict[str, float]:
    """Magnitudes of the results that a `tvmx.quantize.Calibration` holds, by the name of the node that makes each."""
    found: dict[str, float] = {}
    for node in names_of(nodes):
        for output in node.outputs:
            stats = calibration.stats.get(output) or calibration.stats.get(calibration.alias.get(output, ""))
            if stats is not None and np.isfinite([stats.low, stats.high]).all():
                found[node.name] = max(found.get(node.name, 0.0), abs(stats.low), abs(stats.high))
    return found


def with_observed(rules: PrecisionRules, observed: dict[str, float], known: Collection[str]) -> PrecisionRules:
    """The rules with these ranges, as far as the program has such nodes; ranges the user gave win."""
    kept = {name: value for name, value in observed.items() if name in known}
    return dataclasses.replace(rules, ranges={**kept, **rules.ranges})
