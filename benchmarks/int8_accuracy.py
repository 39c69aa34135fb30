"""INT8 accuracy: each zoo model quantised with the default settings against FP32 in ONNX Runtime, on real inputs.

Calibration and test inputs differ. A model that loses more than 1 % is quantised again with `max_drop`, which names
the layers responsible and keeps them in float. With --cost, calibration time against plain runs and peak memory of
800 runs against 8 are measured too.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import machine
from benchmarks.models import (
    Inputs,
    ZooModel,
    ctc_text,
    detection_page,
    orient_pages,
    text_lines,
    zoo,
    zoo_model,
)
from benchmarks.models import _chw as chw
from benchmarks.models import _resize as resize
from benchmarks.models import _skimage as picture
from benchmarks.peers import onnxruntime_session

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
PICTURES = ("text", "astronaut", "coffee", "chelsea", "camera", "coins", "rocket", "page")
DROP = 0.01

Outputs = list[np.ndarray]
Score = Callable[[Sequence[Outputs], Sequence[Outputs]], float]


def pictures(size: int, key: str, turns: int, scale: float = 1.0) -> list[Inputs]:
    """Photographs and pages, turned by quarters."""
    made = []
    for name in PICTURES:
        for k in range(turns):
            small = resize(np.ascontiguousarray(np.rot90(picture(name), -k)), size, size)
            pixels = chw(small, *IMAGENET) if scale == 1.0 else small.astype(np.float32).transpose(2, 0, 1)[None]
            made.append({key: np.ascontiguousarray(pixels)})
    return made


def pages(count: int) -> list[Inputs]:
    """Random cuts of two pictures with text, at 320 × 320."""
    rng = np.random.default_rng(0)
    made = []
    for k in range(count):
        sheet = picture(("page", "text")[k % 2])
        height, width = (int(d * rng.uniform(0.6, 1.0)) for d in sheet.shape[:2])
        top, left = (int(rng.integers(0, d - s + 1)) for d, s in zip(sheet.shape, (height, width)))
        cut = np.ascontiguousarray(sheet[top : top + height, left : left + width])
        made.append({"x": chw(resize(cut, 320, 320), *IMAGENET)})
    return made


def words() -> list[str]:
    """Those of this project's documents."""
    text = " ".join(p.read_text(encoding="utf-8") for p in sorted(Path(__file__).parents[1].glob("docs/*.md")))
    return sorted(set(re.findall(r"\b[A-Za-z][a-z]{2,9}\b", text)))


def lines(count: int, seed: int) -> list[tuple[str, Inputs]]:
    """(text, picture) of rendered lines of one to three words or a number, cut as a detector's boxes are.

    That is how recognisers are fed: little margin, 48 high, zeros behind. In wide margins they see spaces that they
    are not sure of, so that the float model itself misreads 44 % of such lines.
    """
    from PIL import Image, ImageDraw, ImageFont

    rng, known, made = np.random.default_rng(seed), words(), []
    for _ in range(count):
        chosen = [str(w) for w in rng.choice(known, int(rng.integers(1, 4)))]
        if rng.random() < 0.3:
            chosen[-1] = str(rng.integers(10, 10000))
        font, margin = ImageFont.load_default(size=int(rng.integers(24, 49))), int(rng.integers(3, 6))
        while True:
            left, top, right, bottom = font.getbbox(" ".join(chosen))
            height = bottom - top + 2 * margin
            width = round((right - left + 2 * margin) * 48 / height)
            if width <= 320 or len(chosen) == 1:
                break
            chosen.pop(0)
        image = Image.new("RGB", (round(right - left + 2 * margin), round(height)), "white")
        ImageDraw.Draw(image).text((margin - left, margin - top), " ".join(chosen), fill="black", font=font)
        pixels = np.zeros((1, 3, 48, 320), np.float32)
        pixels[..., :width] = chw(np.asarray(image.resize((min(width, 320), 48))), [0.5] * 3, [0.5] * 3)
        made.append((" ".join(chosen), {"x": pixels}))
    return made


def sheets(count: int, seed: int) -> list[Inputs]:
    """320 × 320 pages of rendered lines of 14 to 32 pixels, every other one over a photograph."""
    from PIL import Image, ImageDraw, ImageFont

    rng, known, made = np.random.default_rng(seed), words(), []
    for k in range(count):
        image = Image.new("RGB", (320, 320), tuple(int(v) for v in rng.integers(200, 256, 3)))
        if k % 2:
            image = Image.fromarray(resize(picture(PICTURES[1 + k // 2 % 6]), 320, 320))
        draw, y = ImageDraw.Draw(image), int(rng.integers(4, 20))
        while y < 290:
            size, x = int(rng.integers(14, 33)), int(rng.integers(4, 80))
            font = ImageFont.load_default(size=size)
            line = " ".join(str(w) for w in rng.choice(known, int(rng.integers(1, 5))))
            if k % 2 and rng.random() < 0.5:
                _, _, right, bottom = font.getbbox(line)
                draw.rectangle((x - 4, y - 2, x + right + 4, y + bottom + 4), fill="white")
            draw.text((x, y), line, fill=tuple(int(v) for v in rng.integers(0, 80, 3)), font=font)
            y += size + int(rng.integers(6, 40))
        made.append({"x": chw(np.asarray(image), *IMAGENET)})
    return made


def files(paths: list[Path]) -> list[Inputs]:
    """The first and last 1024 bytes of files, padded with 256, as magika reads them."""
    made = []
    for path in paths:
        data = path.read_bytes()
        head, tail = data.lstrip()[:1024], data.rstrip()[-1024:]
        values = [*head, *[256] * (1024 - len(head)), *[256] * (1024 - len(tail)), *tail]
        made.append({"bytes": np.array([values], np.int32)})
    return made


def random_runs(model: ZooModel, count: int, seed: int) -> list[Inputs]:
    return [model.random_inputs(np.random.default_rng(seed + k)) for k in range(count)]


def inputs_of(model: ZooModel) -> tuple[list[Inputs], list[Inputs]]:
    """(calibration, test) inputs: real ones where there are any."""
    if model.name == "orient":
        return pictures(224, "x", 4), [f for _, f in orient_pages()]
    if model.name == "ppocr4-det":
        return pages(24) + sheets(40, 1), [f for _, f in detection_page()] + sheets(24, 9)
    if model.name == "ppocr4-rec":
        return [f for _, f in lines(128, 1)], [f for _, f in text_lines() + lines(200, 2)]
    if model.name == "yolox":
        made = pictures(416, "images", 3, 255.0)
        return made[::2], made[1::2]
    if model.name == "magika":
        sources = sorted(Path(__file__).parents[1].rglob("*.*"))
        usable = [p for p in sources if p.is_file() and ".git" not in p.parts and 200 < p.stat().st_size < 200_000]
        chosen = usable[:: max(1, len(usable) // 80)]
        return files(chosen[::2]), files(chosen[1::2])
    return random_runs(model, 48, 0), random_runs(model, 16, 1000)


def top1(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    return float(np.mean([np.mean(a[0].argmax(-1) == b[0].argmax(-1)) for a, b in zip(expected, got)]))


def mask_iou(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """Of the text mask at 0.3."""
    a, b = (np.stack([r[0] for r in runs]) > 0.3 for runs in (expected, got))
    return float((a & b).sum() / max(1, (a | b).sum()))


def cosine(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """Least over the runs, of the last output (a sentence's embedding, a detector's boxes)."""
    pairs = [(a[-1].ravel().astype(np.float64), b[-1].ravel()) for a, b in zip(expected, got)]
    return float(min(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in pairs))


def texts(path: Path) -> Score:
    """Share of the lines whose recognised text is equal."""
    import onnx

    meta = {p.key: p.value for p in onnx.load(path).metadata_props}
    charset = meta["character"].splitlines()
    return lambda a, b: float(np.mean([ctc_text(x[0][0], charset) == ctc_text(y[0][0], charset) for x, y in zip(a, b)]))


def score_of(model: ZooModel) -> tuple[str, Score]:
    if model.name == "ppocr4-rec":
        return "text equality", texts(model.path)
    if model.name == "ppocr4-det":
        return "mask IoU", mask_iou
    if model.name in ("orient", "magika", "resnet18"):
        return "top-1 agreement", top1
    return "least cosine", cosine


def run_compiled(model: Any, test: list[Inputs], shapes: Any, folder: Path, constants: Any = None) -> list[Outputs]:
    import tvmx
    from tvmx.runtime import GraphExecutor

    path = tvmx.compile(model, folder / "model.so", shapes=shapes, constants=constants).path
    with GraphExecutor(path) as program:
        return [list(program(f).values()) for f in test]


def sqnr(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """In dB, of the worst output over all runs."""
    worst = np.inf
    for k in range(len(expected[0])):
        a, b = (np.stack([r[k] for r in runs]).astype(np.float64) for runs in (expected, got))
        if not np.array_equal(a, b):
            worst = min(worst, 10 * np.log10((a**2).sum() / ((a - b) ** 2).sum()))
    return float(worst)


def measure(model: ZooModel, observer: str, table: bool) -> dict[str, Any]:
    import tvmx

    calibration, test = inputs_of(model)
    session = onnxruntime_session(str(model.path), 1)
    expected = [session.run(None, {**f, **model.constants}) for f in test]
    name, score = score_of(model)
    where = {"shapes": model.shapes, "constants": model.constants}
    row: dict[str, Any] = {"model": model.name, "measure": name, "samples": len(calibration), "test": len(test)}
    with tempfile.TemporaryDirectory() as folder:
        for drop in (None, DROP):
            quantized = tvmx.quantize(
                str(model.path), calibration, observer, max_drop=drop, metric=score if drop else None, **where
            )
            got = run_compiled(quantized, test, model.shapes, Path(folder))
            key = "default" if drop is None else "max_drop"
            report = quantized.report
            row[key] = {
                "score": score(expected, got),
                "sqnr_db": round(sqnr(expected, got), 1),
                "int8_operators": len(report.layers),
                "size_ratio": round(report.bytes_after / report.bytes_before, 3),
                "in_float": report.accuracy.get("layers in float", []),
            }
            if table:
                print(report)
            if row[key]["score"] >= 1 - DROP:
                break
    return row


def calibration_cost(model: ZooModel, runs: int = 500) -> dict[str, float]:
    """Seconds of `runs` calibration runs over those of plain runs, compiling left out of both."""
    from tvmx.api_quantize import CompiledRun
    from tvmx.quantize import Scheme, collect, make_plan, prepare_model, watched
    from tvmx.quantize.moments import MomentCollector
    from tvmx.target import resolve

    target = resolve("native", 1)
    inputs = random_runs(model, 8, 0)
    proto, name = prepare_model(model.path, model.shapes, model.constants)
    plan = make_plan(proto, name, Scheme().for_target(target), target, dict(model.shapes))
    moments = MomentCollector.of(plan.graph, plan.placement.layers)
    shown = watched(plan.graph, tuple(dict.fromkeys((*plan.tensors, *moments.tensors))))
    with ExitStack() as stack:
        plain, watching = (CompiledRun(p, target, stack) for p in (proto, shown.model))
        for feed in inputs:
            plain(feed), watching(feed)
        seconds = {"plain": 0.0, "calibration": 0.0}
        for _ in range(10):  # alternately, so that both meet the same machine
            block = [inputs[k % 8] for k in range(runs // 10)]
            begin = time.perf_counter()
            for feed in block:
                plain(feed)
            middle = time.perf_counter()
            collect(watching, block, shown.outputs, plan.placement.tensors, moments)
            seconds["plain"] += middle - begin
            seconds["calibration"] += time.perf_counter() - middle
    return {**seconds, "ratio": seconds["calibration"] / seconds["plain"]}


def peak_memory(name: str, batches: int) -> int:
    """Peak resident bytes of a process that calibrates with so many batches."""
    code = (
        "import sys; from benchmarks.int8_accuracy import calibrate_only; calibrate_only(sys.argv[1], int(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", code, name, str(batches)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def calibrate_only(name: str, batches: int) -> None:
    """Calibrate and print the peak memory of this process."""
    import tvmx

    model = zoo_model(name)
    data = (model.random_inputs(np.random.default_rng(k)) for k in range(batches))
    tvmx.calibrate(str(model.path), data, shapes=model.shapes, constants=model.constants)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="of the zoo (default: all)")
    parser.add_argument("--observer", default="mse")
    parser.add_argument("--table", action="store_true", help="print each report: SQNR per layer")
    parser.add_argument("--cost", action="store_true", help="calibration time and memory too")
    parser.add_argument("-o", "--output", type=Path, help="write JSON")
    arguments = parser.parse_args()
    rows = []
    print(json.dumps(machine()))
    for model in zoo():
        if arguments.models and model.name not in arguments.models:
            continue
        row = measure(model, arguments.observer, arguments.table)
        if arguments.cost:
            row["calibration"] = calibration_cost(model)
            few, many = (peak_memory(model.name, n) for n in (8, 800))
            row["memory"] = {"8": few, "800": many, "ratio": many / few}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": machine(), "models": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
