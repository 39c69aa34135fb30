"""The public functions: each composes the stages in the order of the data flow; nothing else knows that order.

frontend → passes → (tune) → graph → memory → executor
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvmx.config import CompileConfig, Shapes, TuneConfig
from tvmx.errors import ConfigError
from tvmx.frontend import Branch, Model, import_programs
from tvmx.frontend import import_onnx as _import_onnx
from tvmx.report.files import check_writable
from tvmx.target import Target, resolve

log = logging.getLogger(__name__)

ModelLike = Any  # str | Path | bytes | onnx.ModelProto | Model | QuantizedModel


@dataclass(frozen=True)
class CompileResult:
    """What `compile` made. `graph` and `plan` are None for a model that runs through the Relax VM."""

    path: Path
    graph: Any  # tvmx.graph.Graph | None
    plan: Any  # tvmx.memory.Solution | None
    report: dict[str, Any]  # seconds per stage, kernels by rule, arena, precisions, reason for the VM
    precision: Any = None  # tvmx.precision.PrecisionPlan of the first entry; None where none was asked for


@dataclass(frozen=True)
class Lowered:
    """A model after every pass: fused, unscheduled kernels, and the program as data when it is a straight line."""

    model: Model
    target: Target
    mod: Any  # tvm.IRModule
    graph: Any  # tvmx.graph.Graph | None
    vm_reason: str | None
    precision: Any = None  # tvmx.precision.PrecisionPlan | None


def import_onnx(
    model: ModelLike,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Model:
    """Load, check and convert an ONNX model to Relax.

    `model` is a path, the bytes of a model, or a ModelProto. `shapes` fixes or names input dimensions:
    `{"x": ("N", 3, 224, 224)}`; `constants` binds inputs (axes, pads, a target shape) at compile time.
    Raises ModelError naming the node, its operator and what to do.
    """
    if isinstance(model, Model):
        if shapes or constants:
            raise ConfigError("this model is imported already; give shapes and constants to import_onnx instead")
        return model
    return _import_onnx(_onnx_of(model), shapes=shapes, constants=constants)


def _onnx_of(model: ModelLike) -> Any:
    """The ONNX model inside a `tvmx.QuantizedModel`; anything else as it is."""
    from tvmx.quantize.model import QuantizedModel

    return model.proto if isinstance(model, QuantizedModel) else model


def lower(
    model: Model,
    target: Target,
    dump_ir: str | Path | None = None,
    precision: Any = None,
    also_known: tuple[str, ...] = (),
) -> Lowered:
    """Run every IR pass and extract the straight-line program, or say why there is none.

    `precision`: a `tvmx.precision.PrecisionRules`, or None to leave the model as it is. Raises ConfigError for rules
    that do not fit the model; `also_known` are names that they may speak of besides (other programs of one model).
    """
    from tvmx.graph import NotStraightLine, from_relax
    from tvmx.passes.precision import plan_of, with_rules
    from tvmx.pipeline import run_phases

    given = precision is not None and not precision.trivial
    mod = run_phases(
        with_rules(model.mod, precision, also_known) if given else model.mod, target, Path(dump_ir) if dump_ir else None
    )
    plan = plan_of(mod)
    if plan is not None:
        model = _with_io(model, mod)
    try:
        graph = from_relax(mod, [t.name for t in model.inputs], [t.name for t in model.outputs], name=model.name)
    except NotStraightLine as reason:
        log.warning("%s runs through the Relax VM: %s", model.name, reason)
        return Lowered(model, target, mod, None, str(reason), plan)
    return Lowered(model, target, mod, graph, None, plan)


def _node_names(models: Mapping[str, Model]) -> tuple[str, ...]:
    """Names of the nodes of several programs, of which each may speak of the others'; none for a single one."""
    from tvmx.passes.precision import node_names

    if len(models) < 2:
        return ()
    return tuple(dict.fromkeys(name for model in models.values() for name in node_names(model.mod)))


def _with_io(model: Model, mod: Any) -> Model:
    """The model with the dtypes of inputs and outputs that `mod` has."""
    main = mod["main"]
    inputs = (dataclasses.replace(t, dtype=str(p.ty.dtype)) for t, p in zip(model.inputs, main.params))
    outputs = (dataclasses.replace(t, dtype=str(f.dtype)) for t, f in zip(model.outputs, main.body.body.ty.fields))
    return dataclasses.replace(model, inputs=tuple(inputs), outputs=tuple(outputs))


def plan_precision(
    model: ModelLike,
    precision: Any = None,
    target: str | Target = "native",
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    io_precision: str | None = None,
    prefer: str | None = None,
    ranges: Any = None,
) -> Any:
    """The `tvmx.precision.PrecisionPlan` that `compile` would apply, without compiling.

    `precision` is what `compile` takes; None shows what the model itself says. `ranges` is a `Calibration` or the file
    that `tvmx calibrate` wrote: what was seen beyond float16 stays in float32. Raises ModelError or ConfigError, as for
    a name that no operator has.
    """
    from tvmx.passes.precision import node_names, plan_of, with_rules
    from tvmx.pipeline import iterate_phases
    from tvmx.precision import rules_from

    rules = rules_from(precision, io_precision, prefer)
    imported = import_onnx(model, shapes, constants).mod
    if ranges is not None:
        rules = _with_ranges(rules, model, ranges, node_names(imported))
    mod = with_rules(imported, rules)
    for phase, after in iterate_phases(mod, resolve(target)):
        if phase == "precision":
            return plan_of(after)
    raise AssertionError("no precision phase")


def _with_ranges(rules: Any, model: ModelLike, ranges: Any, known: list[str]) -> Any:
    """The rules with what calibration saw of the model's nodes."""
    from tvmx.frontend.load import load_model
    from tvmx.precision.observed import observed_ranges, with_observed
    from tvmx.quantize.calibrate import Calibration, load_calibration

    if isinstance(model, Model):
        raise ConfigError("ranges are those of an ONNX model's tensors: give its path, bytes or ModelProto")
    calibration = ranges if isinstance(ranges, Calibration) else load_calibration(ranges)
    proto = load_model(_onnx_of(model)).proto
    return with_observed(rules, observed_ranges(proto.graph.node, calibration), known)


def explain(
    model: ModelLike,
    target: str | Target = "native",
    threads: int | None = None,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Any:
    """What becomes of every quantize and dequantize of a quantised model, and why; a `QdqReport`, nothing is compiled.

    Raises ModelError or ConfigError.
    """
    from tvmx.frontend.load import load_model
    from tvmx.passes.qdq.report import read_report
    from tvmx.quantize.model import kept_in_float

    low = lower(import_onnx(model, shapes, constants), resolve(target, threads))
    report = read_report(low.mod, low.graph)
    if isinstance(model, Model):
        return report
    return dataclasses.replace(report, kept=kept_in_float(load_model(_onnx_of(model)).proto))


def compile(
    model: ModelLike,
    output: str | Path,
    target: str | Target = "native",
    log: str | Path | None = None,
    threads: int | None = None,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    entries: Mapping[str, Shapes] | None = None,
    config: CompileConfig | None = None,
    precision: Any = None,
    io_precision: str | None = None,
    prefer: str | None = None,
) -> CompileResult:
    """Compile a model into one `.so`, with the tuned schedules that `log` (or the shipped logs) holds.

    `entries` compiles the model once per name with those shapes into one `.so` that shares parameters.
    `precision` is a precision's name ("fp16"), a .toml or .json file, a `PrecisionRules` or a `PrecisionPlan`;
    `io_precision` that of float32 inputs and outputs; `prefer` "speed" or "size" (docs/precision.md).
    `config` holds the remaining options; what is given here wins over it.
    Raises ModelError, ConfigError or CompileError. The output is replaced only when the new one is whole.
    """
    from tvmx.executor import EntryProgram, build_artifact
    from tvmx.passes.qdq.report import read_report
    from tvmx.precision import rules_from
    from tvmx.tune.apply import apply_schedules, open_logs

    check_writable(output)
    config = config or CompileConfig()
    # the arguments win over the config where given
    chosen = resolve(target if target != "native" else config.target, config.threads if threads is None else threads)
    log_path = str(log) if log is not None else config.log
    if entries and isinstance(model, Model):
        raise ConfigError("entries= imports the model once per entry; give its path or bytes, not an imported Model")

    rules = rules_from(precision or config.precision, io_precision or config.io_precision, prefer or config.prefer)
    clock = _Clock()
    wanted: Mapping[str, Shapes | None] = entries or {"main": shapes}
    models: dict[str, Model] = {}
    branches: dict[str, Any] = {}
    for entry, entry_shapes in wanted.items():
        _flatten(entry, _programs(model, entry_shapes, constants), models, branches)
    clock("import")
    several = len(models) > 1
    known = _node_names(models)
    lowered = {n: lower(m, chosen, _dump_dir(config.dump_ir, n, several), rules, known) for n, m in models.items()}
    clock("passes")
    logs = open_logs(log_path, shipped=config.use_shipped_logs, target=chosen)
    programs = []
    for entry, low in lowered.items():
        scheduled, used = apply_schedules(low.mod, chosen, logs)
        programs.append(EntryProgram(entry, low.model, low.graph, scheduled, used, low.vm_reason, low.mod))
    clock("schedules")
    built = build_artifact(
        programs,
        chosen,
        Path(output),
        planner=config.planner,
        planner_budget_s=config.planner_budget_s,
        branches=branches,
        streams=config.streams,
        source_folder=Path(config.dump_ir) / "cuda" if config.dump_ir and chosen.kind == "cuda" else None,
    )
    clock("build")
    first = programs[0]
    plan = lowered[first.entry].precision
    summary: dict[str, Any] = {"precision": plan.reasons()} if plan is not None else {}
    quantisation = read_report(lowered[first.entry].mod, lowered[first.entry].graph)
    if quantisation.entries:
        summary["quantisation"] = {
            **quantisation.counts,
            "remaining": len(quantisation.remaining),
            "float tensors between integer kernels": len(quantisation.between),
            "gaps": len(quantisation.gaps),
        }
    return CompileResult(
        path=built.path,
        graph=first.graph,
        plan=built.plan,
        report={
            "seconds": clock.seconds,
            "vm_reason": first.vm_reason,
            **summary,
            **built.report,
        },
        precision=plan,
    )


def tune(
    model: ModelLike,
    target: str | Target = "native",
    log: str | Path | None = None,
    max_trials: int | None = None,
    time_budget_s: float | None = None,
    threads: int | None = None,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    config: TuneConfig | None = None,
    precision: Any = None,
    prefer: str | None = None,
    on_progress: Callable[[Any], None] | None = None,
) -> Any:
    """Search better schedules for a model's kernels and append what is measured to `log` at once.

    Returns a `tvmx.tune.TuneReport`. Ctrl-C ends the session with every result kept; a rerun goes on.
    Raises ModelError, ConfigError or TuneError.
    """
    from tvmx.precision import rules_from
    from tvmx.tune import extract_tasks
    from tvmx.tune import tune as tune_tasks

    given: dict[str, Any] = {
        "log": str(log) if log is not None else None,
        "max_trials": max_trials,
        "time_budget_s": time_budget_s,
        "threads": threads,
    }
    config = dataclasses.replace(config or TuneConfig(), **{k: v for k, v in given.items() if v is not None})
    chosen = resolve(target if target != "native" else config.target, config.threads)
    models: dict[str, Model] = {}
    _flatten("main", _programs(model, shapes, constants), models, {})
    rules = rules_from(precision, prefer=prefer)
    known = _node_names(models)
    lowered = [lower(m, chosen, precision=rules, also_known=known) for m in models.values()]
    tasks = [task for low in lowered for task in extract_tasks(low.mod)]
    return tune_tasks(
        tasks,
        chosen,
        log=config.log,
        max_trials=config.max_trials,
        time_budget_s=config.time_budget_s,
        seed=config.seed,
        on_progress=on_progress,
    )


def verify(
    model: ModelLike,
    target: str | Target = "native",
    threads: int | None = None,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
) -> list[Any]:
    """Run the program after every pass against the model as imported; returns a `PassCheck` each.

    `inputs` default to random values. Raises ModelError or ConfigError.
    """
    from tvmx.debug.verify import verify_per_pass

    imported = import_onnx(model, shapes, constants)
    arrays = dict(inputs) if inputs is not None else random_inputs(imported)
    chosen = resolve(target, threads)
    _refuse_cuda(chosen, "running each pass")
    checks: list[Any] = verify_per_pass(imported, chosen, arrays)
    return checks


def verify_emulated(
    model: ModelLike,
    target: str | Target,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    precision: Any = None,
    on_progress: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Run every kernel of a model for a CUDA target in the CPU emulator; returns a `KernelCheck` each.

    No GPU is needed. Raises ModelError, or ConfigError for a target that is no CUDA target.
    """
    from tvmx.debug.emulate import check_kernels

    lowered = _lower_for_cuda(model, target, shapes, constants, precision)
    checks: list[Any] = check_kernels(lowered.mod, lowered.target, on_progress)
    return checks


def survey(
    model: ModelLike,
    target: str | Target,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    precision: Any = None,
    code: bool = True,
) -> Any:
    """Which schedule each kernel of a model gets on a CUDA target, and its machine code: a `tvmx.cuda.Survey`.

    `code` False leaves the compiler out. Raises ModelError, ConfigError, or CompileError without nvcc and cuobjdump.
    """
    from tvmx.cuda.survey import survey_model

    lowered = _lower_for_cuda(model, target, shapes, constants, precision)
    return survey_model(lowered, lowered.target, code)


def _refuse_cuda(target: Target, what: str) -> None:
    if target.kind == "cuda":
        raise ConfigError(
            f"{what} needs a CPU target, not {target.name}; its kernels are checked with `tvmx verify --emulate`"
        )


def _lower_for_cuda(model: ModelLike, target: str | Target, shapes: Any, constants: Any, precision: Any) -> Lowered:
    from tvmx.precision import rules_from

    chosen = resolve(target)
    if chosen.kind != "cuda":
        raise ConfigError(f"target {chosen.name!r} is no CUDA target; use one such as 'cuda-sm80'")
    imported = import_onnx(model, shapes, constants)
    return lower(imported, chosen, precision=rules_from(precision))


def _programs(model: ModelLike, shapes: Shapes | None, constants: Mapping[str, np.ndarray] | None) -> Model | Branch:
    """The model as one program, or as the branches of an If that only the run can decide."""
    if isinstance(model, Model):
        return import_onnx(model, shapes, constants)
    return import_programs(_onnx_of(model), shapes=shapes, constants=constants)


def _flatten(entry: str, program: Model | Branch, models: dict[str, Model], branches: dict[str, Any]) -> None:
    """Name every straight program below `program` in `models`, and say in `branches` how they belong together."""
    if isinstance(program, Model):
        models[entry] = program
        return
    from tvmx.runtime.manifest import Branch as Parts

    then = f"{entry}_then" if program.then is not None else None
    otherwise = f"{entry}_else" if program.otherwise is not None else None
    branches[entry] = Parts(program.node, f"{entry}_if", then, otherwise, program.reason)
    for name, part in ((f"{entry}_if", program.condition), (then, program.then), (otherwise, program.otherwise)):
        if name is not None and part is not None:
            _flatten(name, part, models, branches)


def random_inputs(model: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """One array per input of a Model or GraphExecutor: standard normal floats, small non-negative integers.

    A symbolic dimension takes the value 1 times its name's lower bound where one is known, else 1.
    """
    rng = np.random.default_rng(seed)
    bounds = getattr(model, "bounds", {}) or {}
    arrays = {}
    for info in model.inputs:
        shape = tuple(d if isinstance(d, int) else max(1, _low(bounds, d)) for d in info.shape)
        arrays[info.name] = _random_array(rng, shape, info.dtype)
    return arrays


def _low(bounds: Mapping[str, Any], name: str) -> int:
    bound = bounds.get(name)
    return int(getattr(bound, "min", 1)) if bound is not None else 1


def _random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith(("int", "uint")):
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype == "bfloat16":
        import ml_dtypes

        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    return rng.standard_normal(shape).astype(dtype)


def _dump_dir(dump_ir: str | None, entry: str, several: bool) -> Path | None:
    if dump_ir is None:
        return None
    return Path(dump_ir) / entry if several else Path(dump_ir)


class _Clock:
    """Seconds per stage: each call charges the time since the last one to its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + now - self._last, 3)
        self._last = now
