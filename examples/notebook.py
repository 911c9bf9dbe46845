# %% [markdown]
# # A cascade in a notebook
#
# Two models answer the same questions; the large one costs 30 times as much. Which rows need it? From arrays of logits
# to a policy, its curve, an estimator, and a run on Ray. Cells begin with `# %%`: Jupyter and VS Code open the file as
# a notebook, and `python -m examples.notebook FOLDER` runs it.

# %%
from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import cauc_ray

FOLDER = Path(sys.argv[1] if __name__ == "__main__" and len(sys.argv) > 1 else tempfile.mkdtemp())
if "ipykernel" not in sys.modules:
    mpl.use("Agg")

# %% [markdown]
# ## Two classifiers, and their answers on unseen images

# %%
X, y = load_digits(return_X_y=True)
X_train, X_rest, y_train, y_rest = train_test_split(X / 16, y, train_size=0.15, random_state=0, stratify=y)
X_fit, X_test, y_fit, y_test = train_test_split(X_rest, y_rest, train_size=0.6, random_state=0, stratify=y_rest)
classifiers = {
    "small": LogisticRegression(C=0.01, max_iter=1000).fit(X_train, y_train),
    "large": MLPClassifier((256,), tol=1e-3, random_state=0).fit(X_train, y_train),
}
costs = {"small": 0.64, "large": 18.944}  # multiply-adds, in thousands
logits = {name: classifier.predict_log_proba(X_fit) for name, classifier in classifiers.items()}

# %% [markdown]
# ## A policy: calibrated on half of the rows, its threshold chosen on the others within a budget

# %%
policy = cauc_ray.fit(
    logits,
    y_fit,
    costs=costs,
    cost_unit="k multiply-adds",
    validation=0.5,
    budget=6.0,
    logit_kind="log-probabilities",
)
policy  # a notebook shows its stages

# %% [markdown]
# ## What it is worth on rows that nothing was fitted on

# %%
test_logits = {name: classifier.predict_log_proba(X_test) for name, classifier in classifiers.items()}
evaluation = cauc_ray.evaluate(test_logits, policy, labels=y_test)
accuracy = evaluation.measures.accuracy
assert accuracy is not None
print(f"accuracy {accuracy.value:.1%} at {evaluation.measures.cost:.1f} {policy.cost_unit} per image")
evaluation.plot().figure.savefig(FOLDER / "curve.png", dpi=120)

# %% [markdown]
# Any other budget is a look at the curve; nothing is fitted again.

# %%
frugal = policy.with_budget(2.0)
predictions = frugal.predict(test_logits)
print(f"budget 2: {predictions.cost.mean():.2f} per image, {(predictions.stage == 1).mean():.0%} reach the large model")
predictions.to_pandas().head()

# %% [markdown]
# ## The same as an estimator, which calls the large classifier for deferred rows only

# %%
members = [(name, clone(classifier)) for name, classifier in classifiers.items()]
model = cauc_ray.CascadeClassifier(members, costs=costs, budget=6.0, cv=3)
model.fit(np.concatenate([X_train, X_fit]), np.concatenate([y_train, y_fit]))
print(f"estimator: accuracy {model.score(X_test, y_test):.1%}, {model.predictions(X_test).cost.mean():.1f} per image")

# %% [markdown]
# ## To a run: a logit table, a pool file of saved answers, the policy's file
#
# With `kind: python`, `torchvision` or another in place of `saved`, the same policy runs the models themselves.

# %%
ids = [f"digit-{row:04d}" for row in range(len(X_test))]
stages = []
for name, z in test_logits.items():
    cauc_ray.write_logits(
        FOLDER / "LOGITS",
        name,
        "test",
        example_ids=ids,
        logits=z,
        labels=y_test,
        cost=costs[name],
        cost_unit=policy.cost_unit,
        logit_kind="log-probabilities",
    )
    stages.append({"name": name, "model": {"kind": "saved", "logits": "LOGITS", "model": name, "split": "test"}})
pool = {"name": "digits", "task": "image-classification", "stages": stages}
(FOLDER / "pool.yaml").write_text(yaml.safe_dump(pool, sort_keys=False))
policy.save(FOLDER / "policy.json")
pq.write_table(pa.table({"example_id": ids}), FOLDER / "input.parquet")
print(f"cauc run {FOLDER}/pool.yaml --policy {FOLDER}/policy.json --input {FOLDER}/input.parquet -o {FOLDER}/out")
