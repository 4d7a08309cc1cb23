"""What a measurement found: rows of figures with the command and the machine, as JSON and as a table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A value for each column: text, a number, or a list of a median and both ends of its 95 % interval; or ``error``."""
_FORMATS = {"ms": ".1f", "step ms": ".1f", "sent MB": ".1f", "link MB": ".1f", "apart": ".0e"}


@dataclass(frozen=True)
class Result:
    """A run: what was measured, in one line, the command, the machine, and the rows of the table."""

    title: str
    command: str
    machine: Mapping[str, object]
    rows: Sequence[Row]

    @classmethod
    def read(cls, file: Path) -> Result:
        """Return the result that :meth:`write` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def write(self, file: Path) -> None:
        """Write everything as JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """Return the rows as a table in Markdown, without empty columns, and a line for each that has no figures."""
        shown = [row for row in self.rows if "error" not in row]
        known = dict.fromkeys(name for row in shown for name in row)
        columns = [name for name in known if any(row.get(name) is not None for row in shown)]
        cells = [columns, *([_cell(name, row.get(name)) for name in columns] for row in shown)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        texts = [any(isinstance(row.get(name), str) for row in shown) for name in columns]
        rule = ["-" * width if text else "-" * (width - 1) + ":" for width, text in zip(widths, texts, strict=True)]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            for row in (cells[0], rule, *cells[1:])
        ]
        remarks = [f"\n{', '.join(map(str, row.values()))}" for row in self.rows if "error" in row]
        return "\n".join([*lines, *remarks])


def _cell(name: str, value: Any) -> str:  # noqa: ANN401 - whatever a row holds
    if isinstance(value, list):
        return "{:.3f} ({:.3f} - {:.3f})".format(*value)
    if isinstance(value, float):
        return format(value, _FORMATS.get(name, ".2f"))
    return "" if value is None else str(value)
