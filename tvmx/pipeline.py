"""The phases of IR passes, in order. Read this first: it is the map of the compiler's middle.

Each phase is a function from a Target to a list of passes. A mode filters phases; it never reorders them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tvmx.errors import CompileError, TvmxError
from tvmx.passes.legalize import legalizers
from tvmx.target import Target

log = logging.getLogger(__name__)

Pass = Any  # tvm.transform.Pass
Phase = Callable[[Target], list[Pass]]


def canonicalize(target: Target) -> list[Pass]:
    """Constants folded, dead and duplicate code removed, inference forms of training operators."""
    from tvm import relax

    from tvmx.passes.canonicalize import RULES
    from tvmx.passes.rewrite import rewrite_pass

    return [
        relax.transform.DecomposeOpsForInference(),
        rewrite_pass("tvmx.Canonicalize", RULES),
        relax.transform.CanonicalizeBindings(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.DeadCodeElimination(),
    ]


def precision(target: Target) -> list[Pass]:
    """Casts as the module's precision rules say; before layout, while variables still carry their nodes' names."""
    from tvmx.passes.precision import assign_precision

    return [assign_precision(target)]


def layout(target: Target) -> list[Pass]:
    """NHWC activations: channels are the vector dimension of every kernel, whatever their count."""
    from tvm import relax

    from tvmx.passes.layout import convert_layout

    return [
        convert_layout(target),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(),
    ]


def qdq(target: Target) -> list[Pass]:
    """Quantised operators become integer ones; quantize and dequantize move, cancel or end up in epilogues."""
    from tvm import relax

    from tvmx.passes.qdq import qdq_passes

    return [*qdq_passes(target), relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()]


def lower(target: Target) -> list[Pass]:
    """Operators become TensorIR; weights are packed now, since packing a constant is constant folding."""
    from tvm import relax

    from tvmx.passes.fold_kernels import fold_kernels
    from tvmx.passes.legalize.early import legalize_early

    return [
        legalize_early(target),
        relax.transform.LegalizeOps(legalizers(target)),
        # Right here: FuseOps would merge reshapes into their neighbours and turn views into copies.
        relax.transform.RewriteDataflowReshape(),
        fold_kernels(),
        relax.transform.DeadCodeElimination(),
    ]


def fuse(target: Target) -> list[Pass]:
    """Vertical fusion: elementwise epilogues join the kernel that makes their input."""
    from tvm import relax

    from tvmx.passes.fuse import fuse_kernels, guard_patterns

    return [
        relax.transform.AnnotateTIROpPattern(),
        guard_patterns(),
        fuse_kernels(),
        relax.transform.DeadCodeElimination(),
    ]


PHASES: tuple[Phase, ...] = (canonicalize, precision, layout, qdq, lower, fuse)


def run_phases(mod: Any, target: Target, dump_dir: Path | None = None) -> Any:
    """Run every phase on a Relax IRModule; with `dump_dir`, write `NN_phase.py` after each."""
    for index, (name, after) in enumerate(iterate_phases(mod, target)):
        mod = after
        if dump_dir is not None:
            dump_ir(mod, dump_dir / f"{index + 1:02}_{name}.py")
    return mod


def iterate_phases(mod: Any, target: Target) -> Iterator[tuple[str, Any]]:
    """Yield (phase name, module after it). Raises CompileError for a pass that fails, which is ours to mend."""
    import tvm

    with target.tvm(), tvm.transform.PassContext(opt_level=3):
        for phase in PHASES:
            try:
                mod = tvm.transform.Sequential(phase(target))(mod)
            except TvmxError:
                raise
            except Exception as error:  # TVM raises whatever its C++ side threw
                log.debug("phase %s failed", phase.__name__, exc_info=True)
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise CompileError(
                    f"the {phase.__name__} passes fail on this model: {reason}; please report it with the model"
                ) from error
            yield phase.__name__, mod


def all_passes(target: Target) -> Iterator[tuple[str, Pass]]:
    """Yield (phase name, pass) in the order in which `run_phases` runs them."""
    for phase in PHASES:
        for step in phase(target):
            yield phase.__name__, step


def dump_ir(mod: Any, path: Path) -> None:
    """Write a module as TVMScript, constants left out, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(mod.script(show_meta=False))
    os.replace(temporary, path)
