"""`cauc fit` with a calibrator, a certificate, guards, --safe and --search; what other verbs say of such policies."""

import json

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import CaucWarning
from cauc_ray.policies.policy import Policy
from cauc_ray.schemas import schema_path

MODELS = ["m0", "m1", "m2"]
POOL = [*MODELS, "m3"]
LIMIT = "risk<=0.1@0.9"
TYPES = {"prediction": pa.int32(), "confidence": pa.float32(), "stage": pa.int8(), "cost": pa.float32()}
PREDICTIONS = pa.schema({"example_id": pa.string(), **TYPES, "label": pa.int32()})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return tables: enough examples for a certificate, so few that guards warn, and of a pool."""
    folder = tmp_path_factory.mktemp("home")
    write_table(folder / "LOGITS", n=1500)
    write_table(folder / "FEW", n=90)
    write_table(folder / "POOL", n=250, strengths=(0.8, 1.4, 1.5, 2.4))
    return folder


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ("LOGITS", {"models": MODELS[:2], "calibrator": "isotonic"}, "calibrated by temperature and isotonic maps"),
        ("LOGITS", {"method": "rf", "certify": LIMIT}, "certified with 90 % confidence"),
        ("LOGITS", {"price": 0.01}, "at 0.01 errors per GFLOPs"),
        ("FEW", {"method": "rf", "safe": True, "budget": 9.0}, "safe: "),
        ("POOL", {"models": POOL, "method": "rf", "search": True, "budget": 8.0}, "of 15 chains of 4 models"),
    ],
    ids=str,
)
def test_the_command_writes_and_shows_what_python_fits(cauc, table, options, words):
    flags = [
        word
        for name, value in {"models": MODELS, **options}.items()
        for word in (f"--{name}", *([] if value is True else [",".join(value) if isinstance(value, list) else value]))
    ]
    fit = ["fit", table, *flags, "-o", "p.json"]
    code, out, _ = cauc(*fit)
    policy = Policy.load("p.json")
    assert (code, words in " ".join(out.split())) == (0, True)
    assert policy == cauc_ray.fit(table, **{"models": MODELS, **options})
    figures = json.loads(cauc(*fit, "--json")[1])
    assert figures["policy_id"] == policy.id
    content = policy.model_dump(mode="json")
    assert {key: figures[key] for key in content} == content
    jsonschema.validate(content, json.loads(schema_path("policy").read_text()))
    assert words in " ".join(cauc("show", "p.json")[1].split())
    evaluate, evaluation = ["evaluate", table, "--policy", "p.json"], cauc_ray.evaluate(table, "p.json")
    code, out, _ = cauc(*evaluate, "--predictions", "p.parquet", "--json")
    assert code == 0
    assert json.loads(out).items() >= json.loads(json.dumps(evaluation.as_json())).items()
    predictions = pq.ParquetFile("p.parquet").read()
    assert predictions.schema == PREDICTIONS
    assert predictions.equals(evaluation.to_arrow())
    assert ("certified at most 10" in cauc(*evaluate)[1]) == ("certify" in options)


def test_examples_that_only_other_models_failed_on_count_in_the_policy(tmp_path):
    """A model that is never chosen, and failed on some examples, changes nothing of the policy of the others."""
    write_table(tmp_path, n=120, strengths=(-3.0, 1.0, 2.0))
    for place, split in enumerate(("calibration", "validation")):
        failed = tmp_path / "failed" / "model=m0" / f"split={split}"
        failed.mkdir(parents=True)
        columns = {"example_id": [f"{split}-{place}-{row:05d}" for row in range(5)], "reason": ["damaged"] * 5}
        pq.write_table(pa.table(columns), failed / "part-0.parquet")
    with pytest.warns(CaucWarning, match="left out"):
        policy = cauc_ray.fit(tmp_path, models=MODELS, method="rf", search=True)
    assert policy.calibration.n == policy.validation.n == 120
    alone = cauc_ray.fit(tmp_path, models=policy.models, method="rf")
    assert policy.search is not None
    assert (policy.id, policy.calibration, policy.curve) == (alone.id, alone.calibration, alone.curve)
