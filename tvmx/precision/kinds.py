"""What kinds of operators there are, as far as precision is concerned. Kinds are Relax names without `relax.`."""

from __future__ import annotations

from typing import Literal

Role = Literal["dense", "elementwise", "reduce", "move", "opaque"]

# Products: operands in 16 bits, accumulated in float32.
DENSE = frozenset(
    ["matmul", *(f"nn.conv{n}d" for n in (1, 2, 3)), *(f"nn.conv{n}d_transpose" for n in (1, 2))]
)  # fmt: skip

# Many elements become one: always computed in float32, whatever they are stored in.
REDUCE = frozenset(
    """sum mean prod std variance max min cumsum cumprod nn.softmax nn.log_softmax nn.layer_norm nn.rms_norm
    nn.instance_norm nn.group_norm nn.batch_norm nn.avg_pool1d nn.avg_pool2d nn.avg_pool3d nn.max_pool1d nn.max_pool2d
    nn.max_pool3d nn.adaptive_avg_pool1d nn.adaptive_avg_pool2d nn.adaptive_avg_pool3d image.resize2d
    nn.prelu""".split()
)

ELEMENTWISE = frozenset(
    """abs acos acosh asin asinh atan atanh ceil clip cos cosh erf exp floor log negative round rsqrt sigmoid sign sin
    sinh sqrt square tan tanh trunc add subtract multiply divide power maximum minimum floor_divide mod floor_mod
    log_add_exp where nn.relu nn.relu6 nn.leakyrelu nn.gelu nn.gelu_tanh nn.selu nn.silu nn.softplus""".split()
)

# Elements only change place: exact in any type, so these follow what they are given.
MOVE = frozenset(
    """reshape permute_dims squeeze expand_dims flatten nn.batch_flatten broadcast_to concat stack split strided_slice
    take tile repeat flip gather_elements gather_nd nn.pad triu tril""".split()
)

# Kept in float32 unless the rules name them: they lose most in 16 bits and cost least in 32.
SENSITIVE = frozenset(
    """nn.softmax nn.log_softmax nn.layer_norm nn.rms_norm nn.instance_norm nn.group_norm nn.batch_norm nn.gelu
    nn.gelu_tanh erf exp log power sum mean prod std variance cumsum cumprod log_add_exp sin cos""".split()
)

# Whatever goes in, the result is small: a magnitude beyond float16 ends here.
BOUNDED = frozenset(
    """nn.softmax sigmoid tanh erf sin cos sign nn.layer_norm nn.rms_norm nn.instance_norm nn.group_norm""".split()
)

KINDS = DENSE | REDUCE | ELEMENTWISE | MOVE


def role_of(kind: str) -> Role:
    """What the casting pass does with an operator of this kind."""
    if kind in DENSE:
        return "dense"
    if kind in REDUCE:
        return "reduce"
    if kind in ELEMENTWISE:
        return "elementwise"
    return "move" if kind in MOVE else "opaque"
