"""Images as calibration inputs, with the preprocessing that the model was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvmx.errors import ConfigError
from tvmx.quantize.graph import Array

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


@dataclass(frozen=True)
class Preprocess:
    """picture → resize → colour order → (x * scale - mean) / std → layout, as float32 with a batch axis.

    `size` is (height, width). `resize`: "stretch" to the size, or "crop": the shorter side first, then the centre.
    `scale` 1/255 gives 0..1; `mean` and `std` are one number a channel, or one for all.
    """

    size: tuple[int, int]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1 / 255
    layout: str = "NCHW"
    color: str = "RGB"
    resize: str = "stretch"

    def __post_init__(self) -> None:
        if len(self.size) != 2 or min(self.size) < 1:
            raise ConfigError(f"image size {self.size}: give height and width")
        for field, value, known in (
            ("layout", self.layout, ("NCHW", "NHWC")),
            ("color", self.color, ("RGB", "BGR", "GRAY")),
            ("resize", self.resize, ("stretch", "crop")),
        ):
            if value not in known:
                raise ConfigError(f"image {field} {value!r}: use one of {', '.join(known)}")
        channels = 1 if self.color == "GRAY" else 3
        for field, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, channels):
                raise ConfigError(f"image {field} {numbers}: give 1 or {channels} numbers")
        if 0 in self.std:
            raise ConfigError("image std: 0 cannot be divided by")


def load_image(path: Path, preprocess: Preprocess) -> Array:
    """The picture as one sample of the model's input. Raises ConfigError when it cannot be read."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images need Pillow: pip install pillow, or give .npy/.npz files") from None
    height, width = preprocess.size
    try:
        with Image.open(path) as opened:
            picture = opened.convert("L" if preprocess.color == "GRAY" else "RGB")
    except (OSError, ValueError, SyntaxError) as err:
        raise ConfigError(f"{path}: not a readable image ({err})") from None
    if preprocess.resize == "crop":
        factor = max(height / picture.height, width / picture.width)
        size = max(width, round(picture.width * factor)), max(height, round(picture.height * factor))
        picture = picture.resize(size, Image.Resampling.BILINEAR)
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    else:
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, np.float32).reshape(height, width, -1)
    if preprocess.color == "BGR":
        pixels = pixels[..., ::-1]
    pixels = (pixels * np.float32(preprocess.scale) - np.array(preprocess.mean, np.float32)) / np.array(
        preprocess.std, np.float32
    )
    if preprocess.layout == "NCHW":
        pixels = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(pixels[None], np.float32)
