"""Permuted tiles in shared memory: a permutation, conflict-free where padding is not, for every row that there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.schedules.cuda.products import Product
from tvmx.cuda.permuted import CHUNK, can_permute, permuted
from tvmx.debug.emulate import compiler, emulate
from tvmx.target import PRESETS


@pytest.mark.parametrize("element", [1, 2])
@pytest.mark.parametrize("row_bytes", [32, 64, 128, 256, 512])
def test_no_bank_conflict_by_counting(element: int, row_bytes: int) -> None:
    row = row_bytes // element
    assert can_permute(row_bytes)
    size = 32 * row
    places = [permuted(offset, row, element) for offset in range(size)]
    assert sorted(places) == list(range(size))
    assert all(p // row == o // row for o, p in enumerate(places)), "rows stay rows"
    for offset in range(0, size, CHUNK // element):  # a chunk stays in one piece, where a vector finds it
        run = places[offset : offset + CHUNK // element]
        assert run == list(range(run[0], run[0] + len(run)))
        assert run[0] * element % CHUNK == 0
    chunks = np.array(places)[:: CHUNK // element] * element // CHUNK
    grid = chunks.reshape(32, row_bytes // CHUNK)
    for first in range(0, 32, 8):
        for column in range(grid.shape[1]):
            assert len(set(grid[first : first + 8, column] % 8)) == 8, "eight rows of an ldmatrix"
    for start in range(0, len(chunks), 8):
        assert len(set(chunks[start : start + 8] % 8)) == 8, "128 bytes that eight threads write"


def test_what_cannot_be_permuted() -> None:
    assert not any(can_permute(n) for n in (16, 48, 96, 40, 0))


def kernels() -> dict[str, Any]:
    """A product with rows of 64 bytes, by either rule."""
    from tvm import te

    from tvmx.passes.legalize import gemm_te
    from tvmx.passes.legalize.gemm_model import Tile
    from tvmx.schedule import Workload, apply_rule, rules_for

    a, b = te.placeholder((1, 60, 96), "float16", "a"), te.placeholder((1, 96, 64), "float16", "b")
    p = gemm_te.Gemm(1, 60, 64, 96, Tile(64, 64, 32, 2, 2, 3), "float32", 8, 8, transposed=False)
    c = gemm_te.product(lambda g, i, j: ([i < 60], a[g, i, j]), gemm_te.packed(b), "float16", True, p)
    func = te.create_prim_func([a, b, gemm_te.unpack(c, (1, 60, 64), p, "float32")])
    rules = rules_for(Workload.of(func), PRESETS["cuda-sm80"])
    return {r.name: apply_rule(r, func, PRESETS["cuda-sm80"]).func for r in rules if r.name.startswith("cuda.mma")}


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_emulated_beside_padded_rows() -> None:
    rng = np.random.default_rng(3)
    a, b = ((rng.integers(-4, 5, s) / 4).astype("float16") for s in ((1, 60, 96), (1, 96, 64)))
    done = {name: emulate(func, PRESETS["cuda-sm80"], [a, b]) for name, func in kernels().items()}
    assert done.keys() == {"cuda.mma", "cuda.mma_padded"}
    for outcome in done.values():
        np.testing.assert_array_equal(outcome.outputs[0], a.astype("float32") @ b.astype("float32"))
        assert outcome.conflicts == 0
    assert done["cuda.mma"].copy_conflicts == 0
    assert done["cuda.mma_padded"].copy_conflicts > 0, "why the permuted layout is the default"


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_a_wrong_permutation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loads permute otherwise than stores, numbers are wrong."""
    from tests.schedules.cuda.products import check
    from tvmx.cuda import permuted as module

    plain = module._State._vector

    def other(self: Any, index: Any, tile: Any) -> Any:
        return index

    monkeypatch.setattr(module._State, "_vector", other)
    with pytest.raises(AssertionError):
        check(Product((32, 64), (64, 32)), PRESETS["cuda-sm80"])
    monkeypatch.setattr(module._State, "_vector", plain)
    check(Product((32, 64), (64, 32)), PRESETS["cuda-sm80"])
