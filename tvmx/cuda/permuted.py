"""Tiles in shared memory whose rows are permuted, so that neither ldmatrix nor cp.async meets a bank conflict.

A row of the tile is a power of two of 16-byte chunks. Chunk c of row r lies at place c ^ f(r) of its row, where f is
chosen so that any eight rows that ldmatrix reads, and any 128 bytes that eight threads write, fall into different
banks, with no bytes lost to padding. A schedule asks for it by annotating the block that fills a tile with `PERMUTED`.
"""

from __future__ import annotations

from typing import Any

PERMUTED = "tvmx.permuted"
CHUNK = 16  # bytes: one row of an 8 × 8 matrix of ldmatrix, and the most that one cp.async moves
BANKS = 8  # of 16 bytes


def can_permute(row_bytes: int) -> bool:
    """Rows of 2, 4, 8, ... chunks. (One chunk a row is conflict-free as it is.)"""
    chunks = row_bytes // CHUNK
    return row_bytes % CHUNK == 0 and chunks >= 2 and chunks & (chunks - 1) == 0


def permuted(offset: Any, row: int, element: int) -> Any:
    """Where the element at `offset` of a tile with `row` elements a row lies; both an int and a TIR expression."""
    chunk, chunks = CHUNK // element, row * element // CHUNK
    row_bits, chunk_bits = row.bit_length() - 1, chunk.bit_length() - 1
    skip = max(0, BANKS.bit_length() - chunks.bit_length())  # rows that 128 bytes hold share one permutation
    mask = min(chunks, BANKS) - 1
    return offset ^ (((offset >> (row_bits + skip)) & mask) << chunk_bits)


def compact_allocation() -> Any:
    """CompactBufferAllocation; tiles of an annotated block whose rows can be permuted lose their padding by it.

    What is permuted is kept in the attribute `PERMUTED`, buffer → (elements of a row, dtype), for when blocks are gone.
    """
    import tvm
    from tvm import s_tir, tirx

    compact = s_tir.transform.CompactBufferAllocation()

    def run(func: Any, _mod: Any, _ctx: Any) -> Any:
        def compacted(f: Any) -> Any:
            return compact(tvm.IRModule({"main": f}))["main"]

        probe = compacted(func)
        rows = _rows(probe)
        return compacted(_without_padding(func, rows)).with_attr(PERMUTED, rows) if rows else probe

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tvmx.CompactBufferAllocation")


def _rows(func: Any) -> dict[str, tuple[int, str]]:
    """(elements of a row, dtype) of the tiles that can be permuted."""
    from tvm.s_tir import SBlock

    from tvmx.schedule.tir import walk

    found: dict[str, tuple[int, str]] = {}

    def visit(block: Any) -> None:
        if PERMUTED in block.annotations:
            buffer = block.writes[0].source
            row = int(buffer.shape[-1])
            if can_permute(row * _bytes(buffer)):
                found[str(buffer.name)] = (row, str(buffer.dtype))

    walk(func.body, SBlock, visit)
    return found


def _without_padding(func: Any, rows: dict[str, tuple[int, str]]) -> Any:
    import tvm_ffi
    from tvm.s_tir import SBlock

    def visit(block: Any, mutator: Any) -> Any:
        block = mutator.default_mutate(block)
        if PERMUTED not in block.annotations or str(block.writes[0].source.name) not in rows:
            return block
        notes = {k: v for k, v in block.annotations.items() if k != "buffer_dim_align"}
        return SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init, block.alloc_buffers,
            block.match_buffers, notes, block.span,
        )  # fmt: skip

    return func.with_body(tvm_ffi.structural_mutate(func.body, [(SBlock, visit)]))


def permute_shared() -> Any:
    """The pass that moves every access; to run on flat, vectorised buffers, after barriers are placed."""
    from tvm import tirx

    def run(func: Any, _mod: Any, _ctx: Any) -> Any:
        import tvm_ffi

        if func.attrs is None or PERMUTED not in func.attrs:
            return func
        state = _State({str(k): (int(row), str(dtype)) for k, (row, dtype) in func.attrs[PERMUTED].items()}, func.body)
        rules = [(tirx.BufferStore, state.store), (_load_type(), state.load), (_call_type(), state.call)]
        body = tvm_ffi.structural_mutate(func.body, rules)
        return func.with_body(body).without_attr(PERMUTED)

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tvmx.PermuteShared")


def _load_type() -> Any:
    from tvm.ir.expr import TensorLoad

    return TensorLoad


def _call_type() -> Any:
    from tvm.ir import Call

    return Call


class _State:
    def __init__(self, rows: dict[str, tuple[int, str]], body: Any) -> None:
        from tvm import tirx
        from tvm.sym import Analyzer

        from tvmx.schedule.tir import walk

        self._analyzer = Analyzer()
        self._tiles: list[tuple[Any, int, int]] = []  # (buffer, elements a row, bytes an element)
        self._values: list[tuple[Any, Any]] = []  # let-bound variables, by which an offset shows what it is made of

        def visit(node: Any) -> None:
            # StorageRewrite lets the products' staging buffer lie in a tile's memory, under the tile's name.
            row, dtype = rows.get(str(node.buffer.name), (0, ""))
            if row and str(node.buffer.dtype) == dtype:
                self._tiles.append((node.buffer, row, _bytes(node.buffer)))

        walk(body, tirx.AllocBuffer, visit)
        walk(body, tirx.DeclBuffer, visit)
        assert {str(t[0].name) for t in self._tiles} == rows.keys(), "a permuted tile has no memory"
        walk(body, tirx.Bind, lambda b: self._values.append((b.var, b.value)))

    def store(self, stmt: Any, mutator: Any) -> Any:
        from tvm import tirx

        stmt = mutator.default_mutate(stmt)
        tile = self._of(stmt.buffer)
        return (
            stmt if tile is None else tirx.BufferStore(stmt.buffer, stmt.value, [self._vector(stmt.indices[0], tile)])
        )

    def load(self, node: Any, mutator: Any) -> Any:
        from tvm import tirx

        node = mutator.default_mutate(node)
        tile = self._of(node.source)
        return node if tile is None else tirx.BufferLoad(node.source, [self._vector(node.indices[0], tile)])

    def call(self, node: Any, mutator: Any) -> Any:
        """ldmatrix(…, tvm_access_ptr(type, tile, offset, …), lane's offset): both offsets become the lane's."""
        import tvm

        node = mutator.default_mutate(node)
        if "ldmatrix" not in getattr(node.op, "name", ""):
            return node
        arguments = list(node.args)
        pointer = arguments[5]
        tile = next((t for t in self._tiles if _is_data(pointer.args[1], t[0])), None)
        if tile is None:
            return node
        start = [*pointer.args[:2], tvm.tirx.const(0, "int32"), *pointer.args[3:]]
        arguments[5] = tvm.ir.Call(pointer.op, start, pointer.attrs, ret_ty=pointer.ty)
        arguments[6] = self._place(pointer.args[2] + arguments[6], tile)
        return tvm.ir.Call(node.op, arguments, node.attrs, ret_ty=node.ty)

    def _of(self, buffer: Any) -> tuple[Any, int, int] | None:
        return next((t for t in self._tiles if t[0].same_as(buffer)), None)

    def _vector(self, index: Any, tile: tuple[Any, int, int]) -> Any:
        """A vector stays within its chunk: its first element is moved, the others follow."""
        from tvm import tirx

        from tvmx.cuda.async_copy import first_and_lanes

        found = first_and_lanes(index)
        assert found is not None, f"a tile is accessed by a vector that is not contiguous: {index}"
        first, lanes = found
        assert lanes * tile[2] <= CHUNK, "a vector wider than a chunk"
        moved = self._place(first, tile)
        return moved if lanes == 1 else tirx.Ramp(moved, tirx.const(1, "int32"), lanes)

    def _place(self, offset: Any, tile: tuple[Any, int, int]) -> Any:
        """The permutation repeats every eight rows: only what is left of them is permuted.

        What a thread's own position adds is then apart from what the pipeline's stage and the fragment's number add,
        and is computed once.
        """
        from tvm import tirx

        from tvmx.schedule.tir import substitute

        _, row, element = tile
        for _ in range(len(self._values)):
            plain = substitute(offset, self._values)
            if plain.same_as(offset):
                break
            offset = plain
        inner = self._analyzer.simplify(tirx.floormod(offset, BANKS * row))
        outer = self._analyzer.simplify(offset - inner)
        return outer + permuted(inner, row, element)


def _is_data(pointer: Any, buffer: Any) -> bool:
    """Is `pointer` the buffer, or its data?"""
    args = getattr(pointer, "args", None)
    inner = args[0] if args is not None and len(args) == 1 else pointer
    return bool(inner.same_as(buffer))


def _bytes(buffer: Any) -> int:
    import tvm

    kind = tvm.DataType(str(buffer.dtype))
    return int(kind.bits * kind.lanes) // 8
