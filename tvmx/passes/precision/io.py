"""Inputs and outputs in another dtype: the casts become the program's first and last operations."""

from __future__ import annotations

from typing import Any

WIDE = "float32"


def cast_io(main: Any, dtype: str) -> Any:
    """A function whose float32 parameters and results are of `dtype`. `main` ends in one flat Tuple."""
    from tvm import relax

    params = [_param(p, dtype) for p in main.params]
    blocks = [list(b.bindings) for b in main.body.blocks]
    first = [
        relax.VarBinding(old, relax.op.astype(new, WIDE))
        for old, new in zip(main.params, params)
        if not old.same_as(new)
    ]
    last = next((b for b in blocks[-1] if b.var.same_as(main.body.body)), None)
    assert last is not None
    assert isinstance(last.value, relax.Tuple)
    blocks[-1].remove(last)
    fields = []
    for i, field in enumerate(last.value.fields):
        if str(getattr(field.ty, "dtype", "")) == WIDE:
            var = relax.DataflowVar(f"output{i}", relax.TensorType(field.ty.shape, dtype))
            blocks[-1].append(relax.VarBinding(var, relax.op.astype(field, dtype)))
            field = var
        fields.append(field)
    result = relax.Var("results", relax.TupleType([f.ty for f in fields]))
    blocks[-1].append(relax.VarBinding(result, relax.Tuple(fields)))
    blocks[0] = [*first, *blocks[0]]
    made = [
        relax.DataflowBlock(bindings) if isinstance(old, relax.DataflowBlock) else relax.BindingBlock(bindings)
        for old, bindings in zip(main.body.blocks, blocks)
    ]
    return relax.Function(params, relax.SeqExpr(made, result), result.ty, attrs=main.attrs)


def _param(param: Any, dtype: str) -> Any:
    from tvm import relax

    if str(getattr(param.ty, "dtype", "")) != WIDE:
        return param
    return relax.Var(param.name, relax.TensorType(param.ty.shape, dtype))
