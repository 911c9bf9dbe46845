"""Folders that a report can be made of, and what a report's figures must be."""

from synthetic import write_table

import cauc_ray
from cauc_ray.files.documents import make_folder, write_json

MODELS = ["m0", "m1", "m2"]


def fitted(folder, *, table=None, **options):
    """Write a table and a policy that is fitted on it into a folder; return the table's chains."""
    chains = write_table(folder / "LOGITS", **(table or {"n": 400}))
    cauc_ray.fit(folder / "LOGITS", models=options.pop("models", MODELS), **options).save(folder / "policy.json")
    return chains


def write_run(folder, policy, *, models=None):
    """Write what a run leaves of itself."""
    figures = {"reached": 9, "answered": 3, "failed": 0, "calls": 1, "batch_fill": 0.5, "compute_s": 1.5}
    figures |= {"busy_share": 0.5, "queue_s": None, "cost": 9.0, "cost_share": 0.4, "lost_calls": 0}
    figures |= {"waiting_s": 0.5, "bytes_out": None, "bytes_in": None}
    stages = [{"name": name, **figures} for name in models or policy.models]
    about = {"run_id": "20260101T000000-abcdef", "policy_id": policy.id, "pool": "p", "n": 9, "n_failed": 0}
    about |= {"cost_unit": policy.cost_unit, "run_s": 1.0, "elapsed_s": 4.0, "stages": stages, "degraded": 0}
    about |= {"cost": 1.0, "relative_cost": 0.5, "accuracy": None, "guards": []}
    about |= {"saving": 0.5, "expected_saving": 0.5, "last_stage_avoided": 0.6, "expected_last_stage_avoided": 0.6}
    make_folder(folder)
    write_json(folder / "summary.json", about)


def at_budget(logits, like, budget):
    """Return the policy like another that fitting at a budget gives, and what evaluating it prints."""
    objective = like.threshold_choice.objective or "accuracy"
    policy = cauc_ray.fit(logits, models=like.models, method=like.method, objective=objective, budget=budget)
    return policy, cauc_ray.evaluate(logits, policy).as_json()


def require_evaluated(pairs, policy, evaluation):
    """Require that figures by label, (value, text) each, are a policy's and its evaluation's, to the last digit."""
    figures = dict(pairs)
    low, high = evaluation["accuracy_interval"]
    interval = f"{100 * evaluation['accuracy']:.1f} % ({100 * low:.1f} – {100 * high:.1f})"
    n = evaluation["n"]
    expected = {
        "threshold": (policy.threshold, f"{policy.threshold:.6g}"),
        "validation accuracy, expected": (policy.expected.accuracy.value, None),
        f"validation cost, expected ({policy.cost_unit})": (policy.expected.cost, f"{policy.expected.cost:.4g}"),
        "test accuracy (95 % interval)": (evaluation["accuracy"], interval),
        "test macro-F1": (evaluation["macro_f1"], f"{100 * evaluation['macro_f1']:.1f} %"),
        f"test cost ({policy.cost_unit})": (evaluation["cost"], f"{evaluation['cost']:.4g}"),
        f"cost relative to {policy.models[-1]} alone": (evaluation["relative_cost"], None),
    } | {
        f"answered by stage {at}, {stage['name']}": (
            stage["answered"],
            f"{100 * stage['answered'] / n:.1f} % ({stage['answered']:,})",
        )
        for at, stage in enumerate(evaluation["stages"], start=1)
    }
    assert figures.keys() == expected.keys()
    for label, (value, text) in expected.items():
        assert float(figures[label][0]) == value, label
        assert text is None or figures[label][1] == text, label
