"""Parameters of the `.so` that `tvmx quantize --prefer size` makes, against FP32: our `.so` and the model's own floats.

Our float32 program may hold more than the model does (weights transformed for Winograd), so both are shown.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.int8_speed import calibration_feeds
from benchmarks.models import ZooModel, zoo


def measure(model: ZooModel, prefer: str, folder: Path) -> dict[str, Any]:
    """Bytes of parameters in float32 and quantised, and those of the quantised program by dtype."""
    import tvmx
    from tvmx.config import CompileConfig
    from tvmx.report.inspect import describe

    where: dict[str, Any] = {"shapes": model.shapes, "constants": model.constants or None, "threads": 1}
    quantized = tvmx.quantize(str(model.path), calibration_feeds(model), scheme=tvmx.Scheme(prefer=prefer), **where)
    sizes = []
    facts: dict[str, Any] = {}
    for source in (str(model.path), quantized):
        where["constants"] = None if source is quantized else where["constants"]
        tvmx.compile(source, folder / "size.so", config=CompileConfig(use_shipped_logs=False), **where)
        facts = describe(folder / "size.so").to_json()
        sizes.append(facts["parameter_bytes"])
    kinds: Counter[str] = Counter()
    for constant in next(iter(facts["entries"].values()))["constants"]:
        kinds[constant["dtype"]] += constant["bytes"]
    return {"fp32": sizes[0], "model": quantized.report.bytes_before, "int8": sizes[1], "dtypes": dict(kinds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="of the zoo (default: all)")
    parser.add_argument("--prefer", choices=["speed", "size"], default="size")
    arguments = parser.parse_args()
    print(f"{'model':14}{'model bytes':>14}{'fp32 .so':>14}{'int8 .so':>14}{'/ model':>9}{'/ fp32':>9}  by dtype")
    with tempfile.TemporaryDirectory() as folder:
        for model in zoo():
            if arguments.models and model.name not in arguments.models:
                continue
            row = measure(model, arguments.prefer, Path(folder))
            ratios = [row["int8"] / row[k] for k in ("model", "fp32")]
            sizes = "".join(f"{row[k]:14,}" for k in ("model", "fp32", "int8"))
            print(f"{model.name:14}{sizes}{ratios[0]:9.4f}{ratios[1]:9.4f}  {row['dtypes']}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
