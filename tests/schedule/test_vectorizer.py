"""The guard against LLVM's loop vectoriser: indices modulo a power of two, on this machine's own instructions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tvmx.schedule import build as building
from tvmx.schedule.vectorizer import is_at_risk, llvm_options
from tvmx.target import resolve


def kernel(shape, out, index=lambda i, n: i % n, name="main"):
    """y[i, j, ...] = x[index(i, n), ...]"""
    from tvm import te

    x = te.placeholder(shape, name="x")
    y = te.compute(out, lambda *i: x[tuple(index(a, n) for a, n in zip(i, shape))], name="y")
    return te.create_prim_func([x, y]).with_attr("global_symbol", name).with_attr("tirx.noalias", True)


def lowered(func):
    import tvm

    return building.lower_module(tvm.IRModule({"main": func}), resolve("native", 1).tvm())


def result(module, shape, out):
    import tvm

    x = np.random.default_rng(0).random(shape, np.float32)
    y = tvm.runtime.tensor(np.zeros(out, np.float32))
    module["main"](tvm.runtime.tensor(x), y)
    return y.numpy(), x[np.ix_(*(np.arange(o) % n for o, n in zip(out, shape)))]


@pytest.mark.parametrize(
    ("shape", "out"), [((3, 4, 5), (21, 24, 20)), ((2, 3, 4, 5), (14, 18, 16, 10)), ((5, 8, 3), (15, 40, 12))]
)
def test_remainders_by_powers_of_two_read_what_they_should(shape, out):
    """Miscompiled for AVX-512 without the guard: two thirds of the values are read from elsewhere."""
    import tvm

    built = building.build_module(tvm.IRModule({"main": kernel(shape, out)}), resolve("native", 1).tvm())
    np.testing.assert_array_equal(*result(built, shape, out))


@pytest.mark.parametrize(
    ("func", "risk"),
    [
        (kernel((3, 4, 5), (21, 24, 20)), True),
        (kernel((12,), (240,)), True),  # 12 = 4 * 3
        (kernel((64,), (64,), lambda i, n: i.astype("uint8").astype("int32")), True),
        (kernel((3, 7, 5), (21, 21, 20)), False),
        # The loop of the remainder holds 5000 iterations: it is not the one that LLVM vectorises.
        (kernel((4, 5000), (8, 5000), lambda i, n: i if n == 5000 else i % n), False),
        (kernel((64, 64), (64, 64), lambda i, n: i), False),
        (kernel((16,), (64,), lambda i, n: i // 4), False),
    ],
    ids=["three axes", "multiple of 4", "cast to a byte", "odd", "outer loop", "plain", "quotient"],
)
def test_what_is_at_risk(func, risk):
    assert is_at_risk(lowered(func)["main"]) == risk


def test_the_option_reaches_only_the_kernels_that_need_it():
    """LLVM's options belong to the process; builds run in threads."""
    import tvm
    from tvm import te

    target = resolve("native", 1).tvm()
    shape, out = (3, 4, 5), (21, 24, 20)
    risky = lowered(kernel(shape, out))
    x = te.placeholder((4096,), name="x")
    double = te.create_prim_func([x, te.compute((4096,), lambda i: x[i] * 2, name="y")])
    plain = lowered(double.with_attr("global_symbol", "main").with_attr("tirx.noalias", True))

    def build(guarded):
        module = building.generate(risky if guarded else plain, target, guarded)
        if not guarded:
            return "vector.body" in module.inspect_source("ll")
        with llvm_options(guarded=True):  # a module's first call generates code
            got, want = result(tvm.runtime.Executable(module), shape, out)
        return bool((got == want).all())

    expected = [build(True), build(False)]
    assert all(expected)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(build, [True, False, False, True] * 5))
    assert found == [*expected, *reversed(expected)] * 5


def test_a_guarded_kernel_has_an_object_file_of_its_own(tmp_path):
    import tvm

    funcs = {"a": kernel((3, 4, 5), (21, 24, 20), name="a"), "b": kernel((64,), (64,), lambda i, n: i, name="b")}
    target = resolve("native", 1).tvm()
    files = building.build_objects(tvm.IRModule(funcs), target, tmp_path / "k.o")
    assert sorted(f.name for f in files) == ["k-guarded.o", "k.o"]
    assert all(f.read_bytes()[:4] == b"\x7fELF" for f in files)
    files = building.build_objects(tvm.IRModule({"b": funcs["b"]}), target, tmp_path / "k.o")
    assert [f.name for f in files] == ["k.o"]
