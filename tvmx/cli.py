"""Command line: parse → dataclass → the function that the Python API calls. Imports only what a subcommand needs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmx.errors import ConfigError, TvmxError

if TYPE_CHECKING:
    import numpy as np

    from tvmx.config import Shapes


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (0 good, 1 the user's mistake, 130 interrupted)."""
    arguments = _parser().parse_args(argv)
    import logging

    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="tvmx: %(message)s")
    try:
        _check_outputs(arguments)
        return int(arguments.function(arguments) or 0)
    except BrokenPipeError:
        return 0
    except (TvmxError, OSError) as error:
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        print(f"tvmx: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tvmx: interrupted", file=sys.stderr)
        return 130


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for what could not be written at the end."""
    from tvmx.report.files import check_writable

    for name in ("output", "trace", "memory", "speed_log"):
        if isinstance(path := getattr(arguments, name, None), str):
            check_writable(path)
    for name in ("dump_ir", "bundle", "offline", *(["log"] if arguments.command == "tune" else [])):
        if isinstance(path := getattr(arguments, name, None), str):
            check_writable(Path(path, "file"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tvmx", description="ONNX model in, one tuned .so out.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, function: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(function=function)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        sub.add_argument("-v", "--verbose", action="store_true", help="log what the stages do")
        return sub

    sub = command("compile", _compile, "compile an ONNX model into one .so")
    _model_arguments(sub)
    sub.add_argument("-o", "--output", required=True, help="the .so to write")
    sub.add_argument("--log", help="tuning log folder (default: the logs that ship with tvmx)")
    sub.add_argument("--dump-ir", metavar="DIR", help="write the IR after each phase into DIR")
    sub.add_argument("--planner", help="memory planner (see `tvmx memory compare`)")
    sub.add_argument("--streams", type=int, help="CUDA targets: the most streams for independent kernels (default 4)")

    _precision_arguments(sub)
    sub.add_argument("--io-precision", help="of float32 inputs and outputs: keep (default), fp16 or bf16")

    sub = command("precision", _precision, "show, save or compare the precision of every operator")
    _model_arguments(sub)
    _precision_arguments(sub)
    sub.add_argument("--io-precision", help="of float32 inputs and outputs: keep (default), fp16 or bf16")
    sub.add_argument("--save", metavar="FILE", help="write the plan (.toml or .json)")
    sub.add_argument("--ranges", metavar="FILE.json", help="what `tvmx calibrate` wrote: beyond float16 stays float32")
    sub.add_argument("--diff", metavar="OTHER", help="list what another precision or plan file assigns differently")

    from tvmx import cli_quantize

    cli_quantize.add_commands(command, _model_arguments)

    sub = command("tune", _tune, "search faster schedules for a model's kernels and log them")
    _model_arguments(sub)
    sub.add_argument("--log", help="tuning log folder, made if absent")
    sub.add_argument("--max-trials", type=int, help="candidates to measure in all")
    sub.add_argument("--time-budget-s", type=float, help="seconds to spend")
    sub.add_argument("--offline", metavar="BUNDLE", help="build candidates into a folder or .tar, to measure elsewhere")
    sub.add_argument("--rpc", metavar="HOST:PORT", help="measure on the machine where a measuring server listens")
    sub.add_argument("--key-file", metavar="FILE", help="with --rpc: the secret that both sides know")
    _precision_arguments(sub)

    sub = command("run", _run, "run a .so on .npy/.npz inputs (random where none is given)")
    _artifact_arguments(sub)
    sub.add_argument("-o", "--output", metavar="FILE.npz", help="write the outputs")

    sub = command("bench", _bench, "time a .so")
    _artifact_arguments(sub)
    sub.add_argument("--repeat", type=int, default=50)
    sub.add_argument("--profile", action="store_true", help="time, bytes and FLOPs per kernel")
    sub.add_argument("--trace", metavar="FILE.json", help="write the profile as a Chrome trace")

    sub = command("inspect", _inspect, "show operators, kernels, memory plan and constants of a .so")
    sub.add_argument("artifact", help="the .so file; with --sass an .onnx file or a CUDA .so")
    sub.add_argument("--memory", metavar="FILE.svg", help="draw the memory plan")
    sub.add_argument("--timeline", metavar="FILE.svg", help="draw how a CUDA library spreads its kernels over streams")
    sub.add_argument(
        "--sass", action="store_true", help="machine code of a CUDA .so, or of an .onnx for a CUDA --target"
    )
    _program_arguments(sub, "cuda-sm80")
    _precision_arguments(sub)

    sub = command("export", _export, "write what a .so needs elsewhere: library, header, C++ and Python examples")
    sub.add_argument("artifact")
    sub.add_argument("--bundle", required=True, metavar="DIR", help="a new or empty folder")

    sub = command("verify", _verify, "run the program after each pass against the model as imported")
    _model_arguments(sub)
    sub.add_argument("--per-pass", action="store_true", help="list every pass, not only the first that breaks")
    sub.add_argument("--emulate", action="store_true", help="run each kernel for a CUDA --target on the CPU instead")
    _precision_arguments(sub)
    sub.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy")

    sub = command("explain", _explain, "say what becomes of every quantize and dequantize of a quantised model")
    _model_arguments(sub)

    sub = command("log", _log, "look into, merge, prune or convert tuning logs")
    sub.add_argument("action", choices=["show", "best", "merge", "prune", "export", "import"])
    sub.add_argument("folders", nargs="+", help="log folder(s); merge: sources then destination")

    sub = command("memory", _memory, "plan a memory problem (CSV) or compare planners on it")
    sub.add_argument("action", choices=["plan", "compare"])
    sub.add_argument("problem", help="a CSV problem (id,lower,upper,size) or a compiled .so")
    sub.add_argument("--capacity", type=int)
    sub.add_argument("--budget-s", type=float, default=2.0)
    sub.add_argument("--planner", default="best")
    sub.add_argument("-o", "--output", metavar="FILE.csv", help="write the offsets")
    return parser


def _version() -> str:
    from tvmx import __version__

    return f"tvmx {__version__}"


def _model_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="the .onnx file")
    _program_arguments(sub, "native")
    sub.add_argument("--threads", type=int, help="threads that kernels are made for (default: all cores)")
    sub.add_argument("--config", metavar="FILE.toml", help="options from a TOML file; flags win over it")


def _program_arguments(sub: argparse.ArgumentParser, target: str) -> None:
    sub.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=DIMS",
        help="an input's shape: x=1,3,224,224, x=N,3,224,224 or x=N:1..8,3,224,224",
    )
    sub.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="bind an input at compile time: a number, a,b,c or a .npy file",
    )
    sub.add_argument("--target", default=target, help="'native' or a preset such as x86_64-avx2 or cuda-sm80")


def _precision_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--precision", help="fp32, fp16, bf16, int8, or a .toml or .json file of rules or a plan")
    sub.add_argument("--prefer", choices=["speed", "size"], help="where 16 bits are storage only (default: speed)")


def _artifact_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("artifact", help="the .so file")
    sub.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="an input, or one .npz")
    sub.add_argument("--threads", type=int)
    sub.add_argument("--device", type=int, help="number of the GPU, for a CUDA library")
    sub.add_argument("--entry", help="entry point, when there are several")


def _shapes(arguments: argparse.Namespace) -> Shapes | None:
    from tvmx.config import parse_shape

    return dict(parse_shape(text) for text in arguments.shape) or None


def _constants(arguments: argparse.Namespace) -> dict[str, np.ndarray] | None:
    import numpy as np

    found: dict[str, np.ndarray] = {}
    for text in arguments.constant:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--constant {text!r}: write it as NAME=VALUE")
        if value.endswith(".npy"):
            found[name] = _load_array(value)
            continue
        try:
            numbers = [float(v) if any(c in v for c in ".einf") else int(v) for v in value.split(",")]
        except ValueError:
            raise ConfigError(f"--constant {text!r}: {value!r} is neither numbers nor a .npy file") from None
        found[name] = np.array(numbers if "," in value else numbers[0])
    return found or None


def _load_array(path: str) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _inputs(specs: list[str]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for spec in specs:
        name, equals, path = spec.partition("=")
        if not equals and spec.endswith(".npz"):
            arrays.update(_load_array(spec))
        elif equals:
            arrays[name] = _load_array(path)
        else:
            raise ConfigError(f"--input {spec!r}: write NAME=FILE.npy, or give one FILE.npz")
    return arrays


def _compile(arguments: argparse.Namespace) -> None:
    from tvmx import api
    from tvmx.config import CompileConfig, load_toml

    config = load_toml(CompileConfig, arguments.config, "compile") if arguments.config else CompileConfig()
    flags = {"dump_ir": arguments.dump_ir, "planner": arguments.planner, "streams": arguments.streams}
    config = dataclasses.replace(config, **{k: v for k, v in flags.items() if v is not None})
    result = api.compile(
        arguments.model,
        arguments.output,
        target=arguments.target,
        log=arguments.log,
        threads=arguments.threads,
        shapes=_shapes(arguments),
        constants=_constants(arguments),
        config=config,
        precision=arguments.precision,
        io_precision=arguments.io_precision,
        prefer=arguments.prefer,
    )
    if arguments.json:
        print(json.dumps({"path": str(result.path), **result.report}))
        return
    seconds = result.report["seconds"]
    print(f"{result.path}: {result.path.stat().st_size / 1e6:.1f} MB in {sum(seconds.values()):.1f} s")
    for key, value in result.report.items():
        print(f"  {key}: {value}")


def _precision(arguments: argparse.Namespace) -> None:
    from tvmx import api

    options = {
        "target": arguments.target,
        "io_precision": arguments.io_precision,
        "prefer": arguments.prefer,
        "ranges": arguments.ranges,
        "shapes": _shapes(arguments),
        "constants": _constants(arguments),
    }
    plan = api.plan_precision(arguments.model, arguments.precision, **options)
    if arguments.save:
        plan.save(arguments.save)
    if arguments.diff:
        lines = plan.diff(api.plan_precision(arguments.model, arguments.diff, **options))
        print(json.dumps(lines) if arguments.json else "\n".join(lines) or "no difference")
    elif arguments.json or not arguments.save:
        print(json.dumps(plan.to_json()) if arguments.json else plan)


def _tune(arguments: argparse.Namespace) -> int:
    from tvmx import api
    from tvmx.config import TuneConfig, load_toml

    config = load_toml(TuneConfig, arguments.config, "tune") if arguments.config else TuneConfig()
    if arguments.offline or arguments.rpc:
        return _tune_elsewhere(arguments, config)
    report = api.tune(
        arguments.model,
        target=arguments.target,
        log=arguments.log,
        max_trials=arguments.max_trials,
        time_budget_s=arguments.time_budget_s,
        threads=arguments.threads,
        shapes=_shapes(arguments),
        constants=_constants(arguments),
        config=config,
        precision=arguments.precision,
        prefer=arguments.prefer,
    )
    print(json.dumps(report.to_json()) if arguments.json else report)
    return 130 if report.interrupted else 0


def _tune_elsewhere(arguments: argparse.Namespace, config: Any) -> int:
    from tvmx.target import resolve
    from tvmx.tune import tune
    from tvmx.tune.from_model import tasks_of
    from tvmx.tune.offline import write_bundle
    from tvmx.tune.rpc import RemoteRunner
    from tvmx.tune.rpc_server import read_key

    if arguments.offline and arguments.rpc:
        raise ConfigError("give --offline or --rpc, not both")
    flags = {"max_trials": arguments.max_trials, "time_budget_s": arguments.time_budget_s, "log": arguments.log}
    config = dataclasses.replace(config, **{k: v for k, v in flags.items() if v is not None})
    target = resolve(
        arguments.target if arguments.target != "native" else config.target, arguments.threads or config.threads
    )
    runner = RemoteRunner(arguments.rpc, read_key(_path(arguments.key_file))) if arguments.rpc else None
    if runner is not None:
        runner.start()  # before anything long begins
    tasks = tasks_of(
        arguments.model, target, _shapes(arguments), _constants(arguments), arguments.precision, arguments.prefer
    )
    options = {"max_trials": config.max_trials, "time_budget_s": config.time_budget_s, "seed": config.seed}
    if runner is None:
        say = None if arguments.json else lambda line: print(line, file=sys.stderr, flush=True)
        bundle = write_bundle(tasks, target, arguments.offline, progress=say, **options)
        print(json.dumps(bundle.to_json()) if arguments.json else bundle)
        return 0
    report = tune(tasks, target, config.log, runner=runner, **options)
    print(json.dumps(report.to_json()) if arguments.json else report)
    return 130 if report.interrupted else 0


def _path(text: str | None) -> Path | None:
    return Path(text) if text is not None else None


def _open(arguments: argparse.Namespace) -> tuple[Any, dict[str, np.ndarray]]:
    from tvmx.runtime import open_executor

    executor = open_executor(
        arguments.artifact, threads=arguments.threads, device=arguments.device, entry=arguments.entry
    )
    given = _inputs(arguments.input)
    if len(given) < len(executor.inputs):
        from tvmx.api import random_inputs

        given = {**random_inputs(executor), **given}
    return executor, given


def _run(arguments: argparse.Namespace) -> None:
    import numpy as np

    executor, inputs = _open(arguments)
    with executor:
        outputs = executor(inputs)
    if arguments.output:
        from tvmx.report.files import atomic_write

        with atomic_write(Path(arguments.output)) as file:
            np.savez(file, **outputs)
    summary = {
        name: {"shape": list(a.shape), "dtype": str(a.dtype), "first": np.ravel(a)[:6].astype(float).tolist()}
        for name, a in outputs.items()
    }
    if arguments.json:
        print(json.dumps(summary))
        return
    for name, info in summary.items():
        print(f"{name}: {info['dtype']}{info['shape']} {info['first']}")


def _bench(arguments: argparse.Namespace) -> None:
    executor, inputs = _open(arguments)
    with executor:
        for name, array in inputs.items():
            executor.set_input(name, array)
        if arguments.profile or arguments.trace:
            profile = executor.profile()
            if arguments.trace:
                profile.save_chrome_trace(arguments.trace)
            print(json.dumps(profile.to_json()) if arguments.json else profile)
            return
        result = executor.benchmark(repeat=arguments.repeat)
    print(json.dumps(dataclasses.asdict(result)) if arguments.json else result)


def _inspect(arguments: argparse.Namespace) -> None:
    if arguments.sass and _is_library(arguments.artifact):
        from tvmx.report.device_code import survey_artifact

        survey = survey_artifact(arguments.artifact)
        print(json.dumps(survey.to_json()) if arguments.json else survey)
        return
    if arguments.sass:
        from tvmx import api

        found = api.survey(
            arguments.artifact, arguments.target, _shapes(arguments), _constants(arguments), arguments.precision
        )
        print(json.dumps(found.to_json()) if arguments.json else found)
        return
    from tvmx.report.inspect import describe

    if arguments.memory:
        from tvmx.report.memory_svg import draw_artifact

        draw_artifact(arguments.artifact, arguments.memory)
    if arguments.timeline:
        from tvmx.report.timeline_svg import draw_timeline

        draw_timeline(arguments.artifact, arguments.timeline)
    description = describe(arguments.artifact)
    print(json.dumps(description.to_json()) if arguments.json else description)


def _is_library(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _export(arguments: argparse.Namespace) -> None:
    from tvmx.executor.bundle import write_bundle

    bundle = write_bundle(arguments.artifact, arguments.bundle)
    files = [str(f.relative_to(bundle.folder)) for f in bundle.files]
    if arguments.json:
        facts = {"folder": str(bundle.folder), "bytes": bundle.bytes, "parameter_bytes": bundle.parameter_bytes}
        print(json.dumps({**facts, "cpp": bundle.cpp, "files": files}))
        return
    print(f"{bundle.folder}: {len(files)} files, {bundle.bytes / 1e6:.2f} MB")


def _verify(arguments: argparse.Namespace) -> int:
    from tvmx import api

    if arguments.emulate:
        return _verify_emulated(arguments)
    checks = api.verify(
        arguments.model,
        target=arguments.target,
        threads=arguments.threads,
        shapes=_shapes(arguments),
        constants=_constants(arguments),
        inputs=_inputs(arguments.input) or None,
    )
    failed = [c for c in checks if not c.ok]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(c) for c in checks]))
    else:
        for check in checks if arguments.per_pass else failed[:1]:
            print(check)
        print(f"{len(checks) - len(failed)} of {len(checks)} passes keep the program's outputs")
    return 1 if failed else 0


def _verify_emulated(arguments: argparse.Namespace) -> int:
    from tvmx import api

    checks = api.verify_emulated(
        arguments.model,
        arguments.target,
        _shapes(arguments),
        _constants(arguments),
        arguments.precision,
        on_progress=None if arguments.json else lambda check: print(check, flush=True),
    )
    failed = [c for c in checks if not c.ok]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(c) for c in checks]))
    else:
        print(f"{len(checks) - len(failed)} of {len(checks)} kernels compute in emulation what they should")
    return 1 if failed else 0


def _explain(arguments: argparse.Namespace) -> None:
    from tvmx import api

    report = api.explain(
        arguments.model,
        target=arguments.target,
        threads=arguments.threads,
        shapes=_shapes(arguments),
        constants=_constants(arguments),
    )
    print(json.dumps(report.to_json()) if arguments.json else report)


def _log(arguments: argparse.Namespace) -> None:
    from tvmx.tune.log_tools import run_action

    report = run_action(arguments.action, [Path(f) for f in arguments.folders])
    print(json.dumps(report) if arguments.json else "\n".join(f"{k}: {v}" for k, v in report.items()))


def _memory(arguments: argparse.Namespace) -> None:
    from tvmx.memory import plan
    from tvmx.report.memory_table import Progress, load_problem, table

    problem = load_problem(arguments.problem)
    interrupted = False
    if arguments.action == "compare":
        from tvmx.memory import compare

        progress = Progress(sys.stderr)
        try:
            compare(problem, arguments.budget_s, capacity=arguments.capacity, watch=progress)
        except KeyboardInterrupt:
            interrupted = True  # what is done is worth showing
        solutions = sorted(progress.done, key=lambda s: s.height)
        if not solutions:
            raise KeyboardInterrupt
    else:
        options = {"planner": arguments.planner, "capacity": arguments.capacity}
        solutions = [plan(problem, budget_s=arguments.budget_s, **options)]
    if arguments.output:
        problem.to_csv(arguments.output, solutions[0])
    if arguments.json:
        print(json.dumps([dataclasses.asdict(s) for s in solutions]))
    else:
        print(table(solutions))
    if interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
