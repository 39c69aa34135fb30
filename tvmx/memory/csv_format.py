"""Planning problems as CSV, the format of google/minimalloc, with optional columns of ours.

Columns `id,lower,upper,size` are required, in any order; `upper` is exclusive. Optional:
`alignment` (1 without the column), `offset` (pinned; empty when not), `alias_of`, `alias_offset`,
`alias`.
"""

from __future__ import annotations

import csv
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from tvmx.errors import PlanError
from tvmx.memory.problem import VIEW, Buffer

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset", "alias_of", "alias_offset", "alias")


def read_csv(path: str | os.PathLike[str]) -> list[Buffer]:
    """Buffers of a CSV file. Raises PlanError naming file and line for anything malformed."""
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as f:  # spreadsheets write a byte order mark
            rows = list(csv.reader(f))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise PlanError(f"{path}: cannot be read as CSV: {e}") from e
    if not rows:
        raise PlanError(f"{path}: is empty; the first line must be {','.join(REQUIRED)}")
    header = [name.strip() for name in rows[0]]
    while header and not header[-1]:  # spreadsheets pad with empty cells
        header.pop()
    missing = [name for name in REQUIRED if name not in header]
    unknown = [name for name in header if name not in REQUIRED + OPTIONAL]
    if missing or unknown or len(set(header)) != len(header):
        raise PlanError(
            f"{path}:1: header {','.join(header)!r}: needs {','.join(REQUIRED)} once each"
            f" and may have {','.join(OPTIONAL)}"
        )
    buffers = []
    for line, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) < len(header) or any(cell.strip() for cell in row[len(header) :]):
            raise PlanError(f"{path}:{line}: {len(row)} fields, the header has {len(header)}")
        cells = dict(zip(header, row))
        try:
            buffers.append(_buffer(cells))
        except PlanError as e:
            raise PlanError(f"{path}:{line}: {e}") from e
    return buffers


def _buffer(cells: dict[str, str]) -> Buffer:
    def number(name: str, default: int | None = None) -> int:
        text = cells.get(name, "").strip()
        if not text and default is not None:
            return default
        if len(text) > 30 or not text.removeprefix("-").isdecimal():
            raise PlanError(f"{name} {text[:30]!r} is not a whole number")
        return int(text)

    return Buffer(
        cells["id"].strip(),
        (number("lower"), number("upper")),
        number("size"),
        number("alignment", 1),
        number("offset") if cells.get("offset", "").strip() else None,
        cells.get("alias_of", "").strip() or None,
        number("alias_offset", 0),
        cells.get("alias", "").strip() or VIEW,
    )


def write_csv(buffers: Sequence[Buffer], path: str | os.PathLike[str]) -> None:
    """Write atomically; `read_csv` gives the same buffers back."""
    path = Path(path)
    columns = list(REQUIRED)
    if any(b.alignment != 1 for b in buffers):
        columns.append("alignment")
    if any(b.offset is not None for b in buffers):
        columns.append("offset")
    if any(b.alias_of is not None for b in buffers):
        columns += ["alias_of", "alias_offset", "alias"]
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with temporary.open("x", newline="", encoding="utf-8") as f:
            writer = csv.writer(f, lineterminator="\n")
            writer.writerow(columns)
            for b in buffers:
                cells = {
                    "id": b.id,
                    "lower": b.start,
                    "upper": b.end,
                    "size": b.size,
                    "alignment": b.alignment,
                    "offset": "" if b.offset is None else b.offset,
                    "alias_of": b.alias_of or "",
                    "alias_offset": b.alias_offset,
                    "alias": b.alias,
                }
                writer.writerow([cells[c] for c in columns])
        os.replace(temporary, path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise PlanError(f"{path}: cannot be written: {e.strerror or e}") from e
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
