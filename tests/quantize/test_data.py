"""Calibration data in every form becomes runs of the model's shapes."""

import numpy as np
import pytest

from tvmx.errors import ConfigError, InputError
from tvmx.quantize import Preprocess
from tvmx.quantize.data import InputSpec, feeds

F32 = np.dtype(np.float32)
X = (InputSpec("x", (None, 3, 4), F32),)
FIXED = (InputSpec("x", (4, 3), F32),)
TWO = (InputSpec("ids", (None, 5), np.dtype(np.int64)), InputSpec("mask", (None, 5), np.dtype(np.int64)))


def shapes(source, inputs=X, **options):
    return [f[inputs[0].name].shape for f in feeds(source, inputs, **options)]


@pytest.mark.parametrize(
    "source",
    [
        {"x": np.zeros((5, 3, 4))},
        {"whatever": np.zeros((5, 3, 4))},
        [np.zeros((2, 3, 4)), np.zeros((3, 3, 4))],
        [{"x": np.zeros((4, 3, 4))}, {"x": np.zeros((3, 4))}],
        np.zeros((5, 1, 3, 4)),
        lambda: (np.zeros((1, 3, 4)) for _ in range(5)),
        ((np.zeros((5, 3, 4)),) for _ in range(1)),
    ],
)
def test_any_source_is_cut_into_single_samples(source):
    assert shapes(source) == [(1, 3, 4)] * 5


def test_a_short_last_batch_repeats_its_own_samples():
    rows = np.arange(18, dtype=np.float32).reshape(6, 3)
    first, last = (f["x"] for f in feeds({"x": rows}, FIXED))
    np.testing.assert_array_equal(first, rows[:4])
    np.testing.assert_array_equal(last, rows[[4, 5, 4, 5]])


def test_files_and_folders(tmp_path):
    np.savez(tmp_path / "a.npz", ids=np.zeros((2, 5), int), mask=np.ones((2, 5), int))
    np.savez(tmp_path / "b.npz", ids=np.zeros((1, 5), int), mask=np.ones((1, 5), int))
    assert shapes(tmp_path, TWO) == [(1, 5)] * 3
    assert shapes(str(tmp_path / "a.npz"), TWO) == [(1, 5)] * 2
    folder = tmp_path / "npy"
    folder.mkdir()
    np.save(folder / "0.npy", np.zeros((3, 4), np.float32))
    np.save(folder / "1.npy", np.zeros((2, 3, 4), np.float32))
    assert shapes(folder) == [(1, 3, 4)] * 3


@pytest.mark.parametrize(
    ("source", "inputs", "message"),
    [
        ({"y": np.zeros((1, 5))}, TWO, "lacks the input 'ids'"),
        ({"x": np.zeros((5, 4, 4))}, X, r"wants \[\?,3,4\]"),
        ({"x": np.zeros((0, 3, 4))}, X, "shape"),
        ({"ids": np.zeros((1, 5)), "mask": np.zeros((1, 5), int)}, TWO, "holds floats"),
        ({"ids": np.zeros((2, 5), int), "mask": np.zeros((3, 5), int)}, TWO, "first dims"),
        ({"x": np.array(["a"])}, X, "the model wants"),
        ([np.zeros((1, 5), int)], TWO, "give a mapping"),
    ],
)
def test_arrays_that_do_not_fit_are_named(source, inputs, message):
    with pytest.raises(InputError, match=message):
        list(feeds(source, inputs))


def test_sources_that_cannot_be_read(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    (tmp_path / "empty").mkdir()
    for source, message in ((tmp_path / "none", "no such"), (tmp_path / "bad.npz", "cannot be read"),
                            (tmp_path / "empty", "holds no"), (3, "type int")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            list(feeds(source, X))


def test_images_with_declared_preprocessing(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[..., 0] = 255
    image.fromarray(pixels).save(tmp_path / "red.png")
    inputs = (InputSpec("x", (1, 3, 4, 6), F32),)
    with pytest.raises(ConfigError, match="preprocessing"):
        list(feeds(tmp_path, inputs))
    options = Preprocess(size=(4, 6), mean=(0.5, 0.25, 0.0), std=(0.5, 1.0, 1.0))
    (feed,) = feeds(tmp_path, inputs, options)
    assert feed["x"].shape == (1, 3, 4, 6)
    np.testing.assert_allclose(feed["x"][0, :, 0, 0], [1.0, -0.25, 0.0], atol=1e-6)
    options = Preprocess(size=(4, 6), color="BGR", layout="NHWC", scale=1.0, resize="crop")
    (feed,) = feeds(tmp_path, (InputSpec("x", (None, 4, 6, 3), F32),), options)
    np.testing.assert_array_equal(feed["x"][0, 0, 0], [0, 0, 255])
