"""Lowering of Relax operators to our own tensor expressions, annotated so that our schedules claim them.

Each family module has `legalizers(target) -> {relax op name: f(bb, call) -> Expr}`; an operator that no family names
keeps TVM's own lowering.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tvmx.target import Target

Legalizer = Callable[[Any, Any], Any]

FAMILIES: tuple[str, ...] = ("conv", "conv3d", "matmul", "norm", "reduce")


def legalizers(target: Target) -> dict[str, Legalizer]:
    """All of our legalizations for `target`, by Relax operator name."""
    table: dict[str, Legalizer] = {}
    for family in FAMILIES:
        table.update(importlib.import_module(f"tvmx.passes.legalize.{family}").legalizers(target))
    return table
