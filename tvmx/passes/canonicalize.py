"""All rewrite rules of the canonicalize phase, in the order in which they are tried at one call."""

from __future__ import annotations

from tvmx.passes import fold, rules_affine, rules_cleanup, rules_nn

RULES = (*fold.RULES, *rules_cleanup.RULES, *rules_nn.RULES, *rules_affine.RULES)
