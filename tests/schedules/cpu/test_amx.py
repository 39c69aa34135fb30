"""AMX products: what is assembled, and the same programs run with each instruction emulated in C, against numpy."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from tvm import relax
from tvm.relax import op as R
from tvmx_schedules.cpu import amx

import tvmx
from tests.onnx_models import model
from tests.passes.qdq.helpers import codes, module, native, passes, run
from tvmx.errors import ArtifactError
from tvmx.passes.legalize.integer_amx import tiles_of
from tvmx.pipeline import fuse, lower, qdq
from tvmx.runtime.artifact import check_machine, read_artifact
from tvmx.runtime.machine import TILES
from tvmx.schedule import apply_default
from tvmx.target import PRESETS, cpu_features

AMX = PRESETS["x86_64-avx512-vnni-amx"]
INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tileloadd64", "tilestored64", "tdpbusd", "tdpbssd")
HAS_AVX512 = AMX.features - TILES <= cpu_features()
QUICK = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
REAL_TEXT = amx.imported_text


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """The emulator's library, its functions in reach of compiled code."""
    path = tmp_path_factory.mktemp("amx") / "emulator.so"
    source = Path(__file__).with_name("amx_emulator.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture
def emulated(emulator, monkeypatch):
    """Kernels call the emulator where they would use AMX. Nothing may be wrong, nor a tile left configured."""
    if not HAS_AVX512:
        pytest.skip("what surrounds the tiles is AVX-512")

    def text(*sizes):
        found = REAL_TEXT(*sizes)
        for name in INSTRUCTIONS:
            found = found.replace(f"@llvm.x86.{name}", f"@tvmx_emulated_{name}")
        return found

    monkeypatch.setattr(amx, "imported_text", text)
    counter = lambda name: ctypes.c_int.in_dll(emulator, f"tvmx_emulated_{name}")  # noqa: E731
    counter("products").value = counter("faults").value = 0
    yield counter
    assert counter("products").value > 0
    assert counter("faults").value == 0
    assert counter("live").value == 0


def multiplied(array, matrix, threads=1):
    """(product, schedule rules) of a constant matrix on the AMX target."""
    mod = module([(array.shape, str(array.dtype))], lambda emit, v: R.matmul(v, relax.const(matrix), out_dtype="int32"))
    return run(mod, dataclasses.replace(AMX, threads=threads), [array])


@pytest.mark.parametrize("data", ["uint8", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_worst_case_is_exact(emulated, data, sign):
    info = np.iinfo(data)
    array = np.full((33, 256), info.max if sign > 0 else info.min or 255, data)
    matrix = np.full((256, 40), 127 if sign > 0 else -128, np.int8)
    found, rules = multiplied(array, matrix)
    np.testing.assert_array_equal(found, array.astype(np.int64) @ matrix.astype(np.int64))
    assert rules == ["cpu.dot_matmul"]


@QUICK
@given(
    rows=st.integers(4, 140), depth=st.integers(64, 330), columns=st.integers(1, 70),
    data=st.sampled_from(["uint8", "int8"]), seed=st.integers(0, 99), threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_any_size(emulated, rows, depth, columns, data, seed, threads):
    rng = np.random.default_rng(seed)
    array, matrix = codes(rng, (rows, depth), data), codes(rng, (depth, columns), "int8")
    found, _ = multiplied(array, matrix, threads)
    np.testing.assert_array_equal(found, array.astype(np.int64) @ matrix.astype(np.int64))


def test_two_threads_and_a_batch(emulated):
    rng = np.random.default_rng(1)
    array, matrix = codes(rng, (2, 128, 384), "uint8"), codes(rng, (384, 512), "int8")
    found, _ = multiplied(array, matrix, threads=2)
    np.testing.assert_array_equal(found, array.astype(np.int64) @ matrix.astype(np.int64))


def test_pointwise_convolution_with_its_epilogue(emulated):
    """The same codes as on the vector unit: conv, bias, relu, quantize in one kernel."""
    rng = np.random.default_rng(2)
    array, weight = codes(rng, (1, 9, 10, 80), "uint8"), codes(rng, (1, 1, 80, 48), "int8")
    const = relax.const

    def body(emit, v):
        x = emit(R.dequantize(v, const(np.float32(0.02)), const(np.uint8(100)), -1, "float32"))
        scale = const(rng.uniform(0.001, 0.01, 48).astype(np.float32))
        w = emit(R.dequantize(const(weight), scale, const(np.zeros(48, np.int8)), 3, "float32"))
        y = emit(R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"))
        y = emit(R.nn.relu(emit(R.add(y, const(rng.uniform(-1, 1, 48).astype(np.float32))))))
        return R.quantize(y, const(np.float32(0.05)), const(np.uint8(3)), -1, "uint8")

    mod = module([(array.shape, "uint8")], body)
    found, rules = run(mod, AMX, [array])
    expected, _ = run(mod, native(), [array])
    np.testing.assert_array_equal(found, expected)
    assert rules == ["cpu.dot_matmul"]


@pytest.mark.parametrize(("data", "instruction"), [("uint8", "tdpbusd"), ("int8", "tdpbssd")])
def test_the_assembler_gets_tiles(data, instruction, tmp_path):
    matrix = np.ones((200, 48), np.int8)
    mod = module([((50, 200), data)], lambda emit, v: R.matmul(v, relax.const(matrix), out_dtype="int32"))
    mod = passes(mod, AMX, qdq, lower, fuse)
    (func,) = [f for _, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    kernel = apply_default(func, AMX).func.with_attr("global_symbol", "kernel")
    built = tvm.compile(tvm.IRModule({"kernel": kernel}), AMX.tvm())
    built.mod.write_to_file(str(tmp_path / "kernel.o"), "o")
    shown = subprocess.run(["objdump", "-d", str(tmp_path / "kernel.o")], capture_output=True, text=True, check=True)
    for name in ("ldtilecfg", instruction, "tilestored", "tilerelease"):
        assert name in shown.stdout
    assert "vpdpbusd" not in shown.stdout


@pytest.mark.parametrize("shape", [(50, 32), (1, 256)])
def test_what_does_not_fill_a_tile_stays_on_the_vector_unit(shape):
    matrix = relax.const(np.ones((shape[1], 48), np.int8))
    mod = module([(shape, "uint8")], lambda emit, v: R.matmul(v, matrix, "int32"))
    names = [gv.name_hint for gv, _ in passes(mod, AMX, qdq, lower).functions_items()]
    assert not any("amx" in n for n in names)


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 49, 100, 196, 1024, 3136])
def test_tiles_cover_the_rows_with_little_waste(rows):
    tile, count = tiles_of(rows)
    assert 1 <= tile <= 16
    assert 1 <= count <= 8
    covered = -(-rows // (tile * count)) * tile * count
    assert rows <= covered < rows * 1.15 + 1


def compiled(depth, path):
    """The artifact of a QDQ product over sums of `depth` codes, for the AMX target."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-100, 100, (depth, 32)).astype(np.int8)
    scales = {"s": np.float32(0.02), "z": np.uint8(10), "ws": np.float32(0.01), "wz": np.int8(0), "w": weight}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
        helper.make_node("MatMul", ["d", "wd"], ["y"]),
    ]
    tvmx.compile(model(nodes, {"x": (4, depth)}, {"y": (4, 32)}, scales), path, target=AMX)
    return read_artifact(path)


def test_the_artifact_asks_for_tiles_only_where_a_kernel_uses_them(tmp_path):
    assert compiled(32, tmp_path / "a.so").manifest.features.isdisjoint(TILES)
    path = tmp_path / "b.so"
    artifact = compiled(128, path)
    assert artifact.manifest.features >= {"amx_tile", "amx_int8"}
    if "amx_tile" in cpu_features():
        return
    with pytest.raises(ArtifactError, match="amx_int8"):
        check_machine(artifact)
    library = ctypes.CDLL(str(path))  # as a C program would
    library.tvmx_pool_new.restype = ctypes.c_void_p
    library.tvmx_last_error.restype = ctypes.c_char_p
    assert library.tvmx_pool_new(1, None) is None
    assert b"does not grant AMX tiles" in library.tvmx_last_error()
