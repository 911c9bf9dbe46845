"""The table of ports in deployments/README.md, as data."""

import re
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parents[1] / "deployments" / "README.md"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: ranges of ports, each (first, last); none where the system chooses."""

    ranges: tuple[tuple[int, int], ...]
    set_by: tuple[str, ...]
    token: str
    tls: str
    who: str

    @property
    def options(self):
        return [name for name in self.set_by if name.startswith("--")]


def table():
    """Return the table's rows by what sets their ports, or that cell's text."""
    text = README.read_text()
    rows = {}
    for line in re.search(r"^  \| port \|.*?\n\n", text, re.S | re.M)[0].strip().splitlines()[2:]:
        port, _, set_by, token, tls, who = (cell.strip() for cell in line.strip().strip("|").split(" | "))
        bounds = [re.findall(r"\d+", part) for part in port.split(",")] if port != "any" else []
        names = tuple(re.findall(r"`([^`]+)`", set_by)) or (set_by,)
        rows[names[0]] = Row(tuple((int(b[0]), int(b[-1])) for b in bounds), names, token, tls, who)
    return rows


ROWS = table()
