"""Reports that several tests look at."""

import json

import pytest
from reported import fitted
from synthetic import chain

import cauc_ray
from cauc_ray.data.writing import write_logits

HOSTILE = ["<script>alert(1)</script>", "a\"b'c`&amp;|*_$x$", "модель-" + "x" * 90]


TABLES = {
    "base": ({"n": 400}, {"method": "base"}),
    "rf": ({"n": 400}, {"method": "rf", "budget": 9.0}),
    "ragged": ({"n": 300, "ragged": True}, {"method": "rf"}),
    "per-call": ({"n": 300, "per_call": True}, {"method": "base", "budget": 12.0}),
    "macro-f1": ({"n": 300}, {"method": "rf", "budget": 8.0, "objective": "macro-f1"}),
}


class Homes(dict):
    """Folders with a policy and its page by name, each made where a test first asks for it."""

    def __init__(self, folders):
        self.folders = folders

    def __missing__(self, name):
        table, options = TABLES[name]
        self[name] = self.folders.mktemp(name)
        fitted(self[name], table=table, **options)
        cauc_ray.report(self[name])
        return self[name]


@pytest.fixture(scope="session")
def homes(tmp_path_factory):
    return Homes(tmp_path_factory)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """Return a report whose models, classes, ids, unit and paths hold what markup is made of, and the models."""
    folder = tmp_path_factory.mktemp("a <b> & 'c'")
    names = [name.replace("/", "\N{DIVISION SLASH}") for name in HOSTILE]
    for shift, split in enumerate(("calibration", "validation", "test")):
        rows = chain(7, 300, shift=shift)
        ids = [f"</script><img src=x onerror=alert({split}-{row})>" for row in range(len(rows))]
        for name, logits in zip(names, rows.logits, strict=True):
            write_logits(folder / "logits", name, split, example_ids=ids, labels=rows.labels, logits=logits)
    models = [{"name": name, "cost": cost} for name, cost in zip(names, (1.0, 3.0, 9.0), strict=True)]
    labels = ["<b>cat", '"><img src=x>', "{{ 7 * 7 }}", "dog\x07\n", "y" * 80]
    info = {"cost_unit": "<i>USD</i> & ]]> `x`", "logit_kind": "<u>raw", "labels": labels, "models": models}
    (folder / "logits" / "pool.json").write_text(json.dumps(info))
    cauc_ray.fit(folder / "logits", models=names, method="rf", budget=3.0).save(folder / "policy.json")
    return cauc_ray.report(folder), names
