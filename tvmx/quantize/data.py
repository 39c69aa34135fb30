"""Calibration data: .npz, a folder of arrays or images, an iterable or a callable → feeds of the model's shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvmx.errors import ConfigError, InputError
from tvmx.quantize.graph import Array
from tvmx.quantize.images import SUFFIXES, Preprocess, load_image

Feed = dict[str, Array]
Source = Any  # str | Path | Mapping | Iterable | Callable[[], Iterable]


@dataclass(frozen=True)
class InputSpec:
    """A model input: dims are ints, or None where the model leaves them open."""

    name: str
    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def feeds(source: Source, inputs: tuple[InputSpec, ...], preprocess: Preprocess | None = None) -> Iterator[Feed]:
    """Every run's feed, one at a time.

    `source` is a .npz file, a folder of .npy/.npz files or of images (with `preprocess`), a mapping
    name → array, an iterable of batches, or a callable that returns one. A batch is a mapping, an array (for a
    model with one input) or a sequence of arrays in the order of the inputs.

    A batch of any size is cut into runs: of one sample where the model leaves its batch open, else of the model's
    batch; a short last run is filled up by repeating its own samples. Raises ConfigError for a source that cannot
    be read and InputError for arrays that do not fit.
    """
    for batch in _batches(source, inputs, preprocess):
        yield from _split(_named(batch, inputs), inputs)


def _batches(source: Source, inputs: tuple[InputSpec, ...], preprocess: Preprocess | None) -> Iterator[Any]:
    if callable(source):
        source = source()
    if isinstance(source, str | Path):
        yield from _files(Path(source), inputs, preprocess)
    elif isinstance(source, Mapping):
        yield source
    elif isinstance(source, Iterable) and not isinstance(source, np.ndarray):
        yield from source
    elif isinstance(source, np.ndarray):
        yield source
    else:
        raise ConfigError(
            f"calibration data of type {type(source).__name__} cannot be read; give a path, arrays by input name, "
            "an iterable of batches, or a callable that returns one"
        )


def _files(path: Path, inputs: tuple[InputSpec, ...], preprocess: Preprocess | None) -> Iterator[Any]:
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in (".npy", ".npz", *SUFFIXES))
    elif path.is_file():
        files = [path]
    else:
        raise ConfigError(f"{path}: no such file or folder; give a .npz file, or a folder of .npy, .npz or images")
    if not files:
        raise ConfigError(f"{path}: holds no .npy, .npz or image ({', '.join(SUFFIXES)})")
    for file in files:
        if file.suffix.lower() in SUFFIXES:
            if preprocess is None:
                raise ConfigError(
                    f"{file}: images need their preprocessing declared (size, mean, std, layout, colour); give "
                    "--image-size H,W and what else differs from 0..1 RGB NCHW"
                )
            if len(inputs) != 1:
                raise ConfigError(f"{file}: images feed models of one input; this one has {len(inputs)}; use .npz")
            yield {inputs[0].name: load_image(file, preprocess)}
        else:
            yield _load(file)


def _load(file: Path) -> Any:
    try:
        loaded = np.load(file, allow_pickle=False, mmap_mode="r" if file.suffix == ".npy" else None)
        return loaded if isinstance(loaded, np.ndarray) else {k: loaded[k] for k in loaded.files}
    except (OSError, ValueError, EOFError, KeyError) as err:
        raise ConfigError(f"{file}: cannot be read as arrays ({err})") from None


def _named(batch: Any, inputs: tuple[InputSpec, ...]) -> Feed:
    """A batch as name → array, of the inputs' dtypes."""
    names = [i.name for i in inputs]
    if isinstance(batch, Mapping):
        given = {str(k): np.asarray(v) for k, v in batch.items()}
        if len(inputs) == 1 and len(given) == 1 and names[0] not in given:
            given = {names[0]: next(iter(given.values()))}
    elif isinstance(batch, tuple | list) and len(inputs) > 1:
        if len(batch) != len(inputs):
            raise InputError(f"a calibration batch has {len(batch)} arrays, the model {len(inputs)} inputs: {names}")
        given = {n: np.asarray(v) for n, v in zip(names, batch)}
    elif len(inputs) == 1:
        only = batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch
        given = {names[0]: np.asarray(only)}
    else:
        raise InputError(f"a calibration batch is one array, but the model has the inputs {names}; give a mapping")
    missing = [n for n in names if n not in given]
    if missing:
        raise InputError(f"calibration data lacks the input {missing[0]!r}; it has {sorted(given)}")
    return {spec.name: _cast(given[spec.name], spec) for spec in inputs}


def _cast(array: Array, spec: InputSpec) -> Array:
    if array.dtype == spec.dtype:
        return array
    if array.dtype.kind in "OSUV":
        raise InputError(f"calibration input {spec.name!r} is {array.dtype}, the model wants {spec.dtype}")
    if spec.dtype.kind in "iub" and array.dtype.kind == "f":
        raise InputError(f"calibration input {spec.name!r} holds floats, the model wants {spec.dtype}")
    return array.astype(spec.dtype)


def _split(batch: Feed, inputs: tuple[InputSpec, ...]) -> Iterator[Feed]:
    """Runs of the model's own shapes out of one batch."""
    stacked = [i for i in inputs if batch[i.name].ndim == len(i.shape) + 1]
    if stacked:  # [runs, *shape]
        runs = {batch[i.name].shape[0] for i in stacked}
        if len(runs) != 1:
            raise InputError(f"calibration inputs {[i.name for i in stacked]} hold different numbers of runs: {runs}")
        for k in range(runs.pop()):
            part = {i.name: batch[i.name][k] if i in stacked else batch[i.name] for i in inputs}
            yield from _split(part, inputs)
        return
    batch = {i.name: batch[i.name][None] if batch[i.name].ndim == len(i.shape) - 1 else batch[i.name] for i in inputs}
    for spec in inputs:
        _check(batch[spec.name], spec)
    rows = _rows(batch, inputs)
    if rows is None:
        yield batch
        return
    size, cut = rows
    length = next(batch[name].shape[0] for name in cut)
    for begin in range(0, length, size):
        index = np.arange(begin, min(begin + size, length))
        index = np.resize(index, size)  # a short last run repeats its own samples
        yield {name: array[index] if name in cut else array for name, array in batch.items()}


def _rows(batch: Feed, inputs: tuple[InputSpec, ...]) -> tuple[int, list[str]] | None:
    """How many rows a run takes, and of which inputs; None when the batch is one run already."""
    cut = [i for i in inputs if i.shape and (i.shape[0] is None or i.shape[0] != batch[i.name].shape[0])]
    if not cut:
        return None
    lengths = {batch[i.name].shape[0] for i in cut}
    if len(lengths) != 1:
        raise InputError(f"calibration inputs {[i.name for i in cut]} have different first dims {sorted(lengths)}")
    size = math.gcd(*(i.shape[0] or 1 for i in cut)) if all(i.shape[0] for i in cut) else 1
    if lengths.pop() == size:
        return None
    return size, [i.name for i in cut]


def _check(array: Array, spec: InputSpec) -> None:
    """Every dim but the first must be the model's."""
    expected = ",".join("?" if d is None else str(d) for d in spec.shape)
    good = array.ndim == len(spec.shape) and all(d in (None, s) for d, s in zip(spec.shape[1:], array.shape[1:]))
    if not good or 0 in array.shape:
        raise InputError(f"calibration input {spec.name!r} has shape {array.shape}; the model wants [{expected}]")


__all__ = ["Feed", "InputSpec", "Source", "feeds"]
