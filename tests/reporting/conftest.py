"""Reports that several tests look at."""

import json

import pytest
from reported import fitted
from synthetic import chain

import cauc_ray
from cauc_ray.data.writing import write_logits

HOSTILE = ["<script>alert(1)</script>", "a\"b'c`&amp;|*_$x$", "модель-" + "x" * 90]
TABLES = {
    "rf": ({"n": 150, "ragged": True}, {"method": "rf", "budget": 9.0}),
    "per-call": ({"n": 150, "per_call": True}, {"method": "base", "budget": 12.0, "objective": "macro-f1"}),
}


@pytest.fixture(scope="session")
def homes(tmp_path_factory):
    """Return folders by name, each with a table, a policy and its page."""
    folders = {}
    for name, (table, options) in TABLES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        fitted(folders[name], table=table, **options)
        cauc_ray.report(folders[name])
    return folders


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """Return a report whose models, classes, ids, unit and paths hold what markup is made of, and the models."""
    folder = tmp_path_factory.mktemp("a <b> & 'c'")
    names = [name.replace("/", "\N{DIVISION SLASH}") for name in HOSTILE]
    for shift, split in enumerate(("calibration", "validation", "test")):
        rows = chain(7, 150, shift=shift)
        ids = [f"</script><img src=x onerror=alert({split}-{row})>" for row in range(len(rows))]
        for name, logits in zip(names, rows.logits, strict=True):
            write_logits(folder / "logits", name, split, example_ids=ids, labels=rows.labels, logits=logits)
    models = [{"name": name, "cost": cost} for name, cost in zip(names, (1.0, 3.0, 9.0), strict=True)]
    labels = ["<b>cat", '"><img src=x>', "{{ 7 * 7 }}", "dog\x07\n", "y" * 80]
    info = {"cost_unit": "<i>USD</i> & ]]> `x`", "logit_kind": "<u>raw", "labels": labels, "models": models}
    (folder / "logits" / "pool.json").write_text(json.dumps(info))
    cauc_ray.fit(folder / "logits", models=names, method="rf", budget=3.0).save(folder / "policy.json")
    return cauc_ray.report(folder), names
