"""Rules and plans as TOML and JSON files."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvmx.errors import ConfigError
from tvmx.precision.plan import PrecisionPlan
from tvmx.precision.rules import PRECISIONS, Assignment, PrecisionRules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Request = Any  # str | Path | PrecisionRules | PrecisionPlan | None


def rules_from(
    request: Request, io: str | None = None, prefer: str | None = None, default: str = "fp32"
) -> PrecisionRules:
    """What a user may give as precision → rules: a precision's name, a file, rules, or a plan; None is `default`.

    `io` and `prefer` replace the rules' own. Raises ConfigError.
    """
    if isinstance(request, PrecisionPlan):
        rules = request.rules()
    elif isinstance(request, PrecisionRules):
        rules = request
    elif request is None:
        rules = PrecisionRules(default)
    elif str(request) in PRECISIONS:
        rules = PrecisionRules(str(request))
    elif Path(str(request)).suffix in (".toml", ".json"):
        rules = load_rules(str(request))
    else:
        near = difflib.get_close_matches(str(request), PRECISIONS)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"precision {request!r} is unknown; {hint}use one of {', '.join(PRECISIONS)}, or a .toml or .json file"
        )
    given: dict[str, Any] = {k: v for k, v in (("io", io), ("prefer", prefer)) if v is not None}
    return dataclasses.replace(rules, **given)


def load_rules(path: str | Path) -> PrecisionRules:
    """Read rules or a saved plan. Raises ConfigError naming the file and an unknown key's neighbours."""
    try:
        text = Path(path).read_text()
        data = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a precision file is a table of options")
    try:
        if "entries" in data:
            return PrecisionPlan.from_json(data).rules()
        return rules_from_table(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def rules_from_table(data: Mapping[str, Any]) -> PrecisionRules:
    """Rules from a parsed file. Raises ConfigError."""
    known = {f.name for f in dataclasses.fields(PrecisionRules)} | {"version"}
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known) or sorted(known)
            raise ConfigError(f"unknown option {key!r}; did you mean {', '.join(near)}?")
    if data.get("version", 1) != 1:
        raise ConfigError(f"version {data['version']!r} is newer than this tvmx; update tvmx")
    options: dict[str, Any] = {}
    for key, kind in (("default", str), ("io", str), ("prefer", str), ("keep_first", bool), ("keep_last", bool)):
        if key in data:
            if not isinstance(data[key], kind):
                raise ConfigError(f"{key} = {data[key]!r} must be a {kind.__name__}")
            options[key] = data[key]
    for key in ("kinds", "operators"):
        table = _table(data, key)
        options[key] = {name: _assignment(f"[{key}] {name!r}", value) for name, value in table.items()}
    ranges = _table(data, "ranges")
    for name, value in ranges.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ConfigError(f"[ranges] {name!r} = {value!r} must be a magnitude, 0 or larger")
    return PrecisionRules(ranges=ranges, **options)


def _table(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{key}] must be a table of names")
    return table


def _assignment(where: str, value: Any) -> Assignment:
    if isinstance(value, str):
        value = {"precision": value}
    if not isinstance(value, dict) or "precision" not in value or set(value) - {"precision", "accumulate"}:
        raise ConfigError(f'{where}: write "fp16", or {{ precision = "fp16", accumulate = "fp32" }}')
    try:
        return Assignment(**value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def rules_table(rules: PrecisionRules) -> dict[str, Any]:
    """The inverse of `rules_from_table`."""
    return {
        "version": 1,
        **{k: getattr(rules, k) for k in ("default", "io", "prefer", "keep_first", "keep_last")},
        **{k: {n: dataclasses.asdict(a) for n, a in getattr(rules, k).items()} for k in ("kinds", "operators")},
        "ranges": dict(rules.ranges),
    }


def plan_toml(plan: PrecisionPlan) -> str:
    """A plan as rules that name every operator, each with its reason as a comment."""
    lines = ["version = 1", 'default = "fp32"', f'io = "{plan.io}"', 'prefer = "size"', "", "[operators]"]
    for entry in plan.entries:
        a = entry.assignment
        plain = a.accumulate == PRECISIONS[a.precision][0]
        value = f'"{a.precision}"' if plain else f'{{ precision = "{a.precision}", accumulate = "{a.accumulate}" }}'
        lines.append(f"{json.dumps(entry.name)} = {value}  # {' '.join(f'{entry.kind}: {entry.reason}'.split())}")
    return "\n".join(lines) + "\n"
