"""`tvmx quantize` and `tvmx calibrate`: their arguments, and the call they make."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmx.errors import ConfigError

if TYPE_CHECKING:
    from tvmx.quantize.images import Preprocess
    from tvmx.quantize.settings import QuantizeConfig


def add_commands(
    command: Callable[..., argparse.ArgumentParser], model_arguments: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add both subcommands."""
    sub = command("quantize", _quantize, "quantise a model to int8: an .onnx in QDQ form, or a .so")
    model_arguments(sub)
    _data_arguments(sub)
    sub.add_argument("--ranges", metavar="FILE.json", help="what `tvmx calibrate` wrote, in place of --calib")
    sub.add_argument("-o", "--output", required=True, help="m.onnx (QDQ model) or m.so (compiled)")
    sub.add_argument("--observer", help="minmax, ema, percentile, entropy, mse, or all to compare them")
    sub.add_argument("--percentile", type=float, help="share of the values in range, in percent (99.99)")
    sub.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=PRECISION",
        help="int8, weight or float for operators by name glob, or op:KIND",
    )
    sub.add_argument("--activations", choices=["auto", "uint8", "int8"])
    sub.add_argument("--per-tensor", action="store_true", help="one scale a weight instead of one a channel")
    sub.add_argument("--reduce-range", choices=["auto", "yes", "no"], help="7-bit weights (x86 without VNNI)")
    sub.add_argument("--rounding", choices=["adaptive", "nearest"], help="weights: errors cancel on the data, or not")
    sub.add_argument(
        "--keep-first", action=argparse.BooleanOptionalAction, help="leave the first layer in float (default: if cheap)"
    )
    sub.add_argument("--keep-last", action="store_true", help="leave the last layer in float")
    sub.add_argument("--equalize", action="store_true", help="equalise weight ranges across layers first")
    sub.add_argument("--bias-correction", choices=["auto", "yes", "no"], help="take mean errors off biases")
    sub.add_argument("--prefer", choices=["speed", "size"], help="size: every weight in int8")
    sub.add_argument("--max-drop", type=float, metavar="SHARE", help="keep layers in float until at most this is lost")
    sub.add_argument("--metric", help="accuracy for --max-drop: auto, top1, cosine, sqnr, ctc, or FILE.py:FUNCTION")
    sub.add_argument("--measure", action="store_true", help="measure the SQNR of each layer by running")
    sub.add_argument("--measure-speed", action="store_true", help="leave in float what measures slower in int8")
    sub.add_argument("--speed-log", metavar="FILE", help="file that keeps the layers' times, with --measure-speed")
    sub.add_argument("--report", metavar="FILE.json", help="write the report")
    sub.add_argument("--log", help="tuning log folder, for a .so")

    sub = command("calibrate", _calibrate, "watch a model on real inputs and write what quantize needs")
    model_arguments(sub)
    _data_arguments(sub)
    sub.add_argument("-o", "--output", required=True, metavar="FILE.json")
    sub.add_argument("--every-tensor", action="store_true", help="all float tensors, for `tvmx precision --ranges`")


def _data_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--calib", metavar="PATH", help="a .npz, or a folder of .npy/.npz files or images")
    sub.add_argument("--image-size", metavar="H,W", help="images: height and width of the model's input")
    sub.add_argument("--image-mean", metavar="M,M,M", help="images: subtracted after scaling (0)")
    sub.add_argument("--image-std", metavar="S,S,S", help="images: divided by (1)")
    sub.add_argument("--image-scale", type=float, help="images: factor of the 0..255 pixels (1/255)")
    sub.add_argument("--image-layout", choices=["NCHW", "NHWC"])
    sub.add_argument("--image-color", choices=["RGB", "BGR", "GRAY"])
    sub.add_argument("--image-resize", choices=["stretch", "crop"])


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        return tuple(float(v) for v in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give numbers with commas between") from None


def _image(arguments: argparse.Namespace, known: Preprocess | None) -> Preprocess | None:
    from tvmx.quantize.images import Preprocess

    flags: dict[str, Any] = {
        "scale": arguments.image_scale,
        "layout": arguments.image_layout,
        "color": arguments.image_color,
        "resize": arguments.image_resize,
    }
    for key in ("mean", "std"):
        text = getattr(arguments, f"image_{key}")
        flags[key] = _numbers(text, f"--image-{key}") if text else None
    if arguments.image_size:
        flags["size"] = tuple(int(v) for v in _numbers(arguments.image_size, "--image-size"))
    given = {k: v for k, v in flags.items() if v is not None}
    if known is not None:
        return dataclasses.replace(known, **given)
    if not given:
        return None
    if "size" not in given:
        raise ConfigError("images need --image-size H,W")
    return Preprocess(**given)


def _settings(arguments: argparse.Namespace) -> QuantizeConfig:
    from tvmx.quantize.settings import QuantizeConfig, load_settings

    config = load_settings(arguments.config) if arguments.config else QuantizeConfig()
    flags = {"threads": arguments.threads, "image": _image(arguments, config.image)}
    if arguments.target != "native":
        flags["target"] = arguments.target
    return dataclasses.replace(config, **{k: v for k, v in flags.items() if v is not None})


def _quantize_settings(arguments: argparse.Namespace) -> QuantizeConfig:
    from tvmx.quantize.scheme import parse_override

    config = _settings(arguments)
    scheme = config.scheme
    flags: dict[str, Any] = {
        "activations": arguments.activations,
        "percentile": arguments.percentile,
        "prefer": arguments.prefer,
        "per_channel": False if arguments.per_tensor else None,
    }
    if arguments.bias_correction is not None:
        flags["bias_correction"] = {"auto": scheme.bias_correction, "yes": True, "no": False}[arguments.bias_correction]
    for key in ("keep_last", "equalize"):
        flags[key] = getattr(arguments, key) or None
    for key in ("keep_first", "rounding"):
        flags[key] = getattr(arguments, key)
    if arguments.reduce_range is not None:
        flags["reduce_range"] = {"auto": scheme.reduce_range, "yes": True, "no": False}[arguments.reduce_range]
    if arguments.override:
        flags["overrides"] = (*scheme.overrides, *map(parse_override, arguments.override))
    scheme = dataclasses.replace(scheme, **{k: v for k, v in flags.items() if v is not None})
    rest = {
        "observer": arguments.observer,
        "max_drop": arguments.max_drop,
        "metric": arguments.metric,
        "measure": arguments.measure or None,
        "measure_speed": arguments.measure_speed or None,
        "speed_log": arguments.speed_log,
    }
    return dataclasses.replace(config, scheme=scheme, **{k: v for k, v in rest.items() if v is not None})


def _quantize(arguments: argparse.Namespace) -> None:
    output = Path(arguments.output)
    if output.suffix not in (".onnx", ".so"):
        raise ConfigError(f"-o {output}: end it in .onnx for the QDQ model or in .so to compile it")
    if bool(arguments.calib) == bool(arguments.ranges):
        raise ConfigError("give calibration data with --calib, or what `tvmx calibrate` wrote with --ranges")
    config = _quantize_settings(arguments)
    from tvmx import api, api_quantize
    from tvmx.cli import _constants, _shapes
    from tvmx.report.files import write_text

    model = api_quantize.quantize(
        arguments.model,
        arguments.ranges or arguments.calib,
        shapes=_shapes(arguments),
        constants=_constants(arguments),
        config=config,
    )
    if output.suffix == ".onnx":
        model.save(output)
    else:
        api.compile(model, output, target=config.target, threads=config.threads, log=arguments.log)
    document = model.report.to_json()
    if arguments.report:
        write_text(Path(arguments.report), json.dumps(document, indent=1) + "\n")
    if arguments.json:
        print(json.dumps({"path": str(output), **document}))
        return
    print(model.report)
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB")


def _calibrate(arguments: argparse.Namespace) -> None:
    if not arguments.calib:
        raise ConfigError("give the calibration data with --calib")
    from tvmx import api_quantize
    from tvmx.cli import _constants, _shapes

    found = api_quantize.calibrate(
        arguments.model,
        arguments.calib,
        shapes=_shapes(arguments),
        constants=_constants(arguments),
        config=_settings(arguments),
        every_tensor=arguments.every_tensor,
    )
    found.save(arguments.output)
    summary = {"path": arguments.output, "tensors": len(found.stats), "samples": found.samples}
    if arguments.json:
        print(json.dumps(summary))
        return
    print(f"{arguments.output}: {len(found.stats)} tensors of {found.samples} samples")
