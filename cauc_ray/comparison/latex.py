"""Tables for LaTeX with booktabs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cauc_ray.display import Grid

_ESCAPED = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "→": r"$\to$",
    "±": r"$\pm$",
    "–": "--",
    "†": r"$^\dagger$",
}


def escaped(text: str) -> str:
    r"""Return text that LaTeX shows as it is; stars after a digit are a superscript.

    >>> print(escaped("a_b: 91.2 ± 0.3**"))
    a\_b: 91.2 $\pm$ 0.3$^{**}$
    """
    text = "".join(_ESCAPED.get(sign, sign) for sign in text)
    return re.sub(r"(?<=\d)(\*+)", r"$^{\1}$", text)


def booktabs(grids: Sequence[Grid]) -> str:
    """Return a table environment of the package booktabs for each grid."""
    return "\n".join(map(_table, grids))


def _table(grid: Grid) -> str:
    lines = []
    for index, row in enumerate(grid.rows):
        cells = [escaped(text) for text in row]
        bold = [rf"\textbf{{{cell}}}" if grid.marks.get((index, at)) else cell for at, cell in enumerate(cells)]
        lines.append(" & ".join(bold) + r" \\")
    caption = escaped(" ".join([f"{grid.title}.", *grid.notes]))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{'l' * grid.n_left}{'r' * (len(grid.headings) - grid.n_left)}}}",
            r"\toprule",
            " & ".join(map(escaped, grid.headings)) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )
