"""Tables in plain text."""

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """A line for each row: the first `left` columns to the left, the others, numbers, to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
