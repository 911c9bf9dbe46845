"""Predictions from arrays: what holds the numbers, what is refused, and what notebooks show."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import chain

from cauc_ray.errors import DataError
from cauc_ray.policies.by_method import fit_policy
from cauc_ray.policies.threshold import ThresholdRule

NAMES = ("calibration", "validation")


def policy_of(**options):
    return fit_policy("rf", chain(**options), chain(shift=1, **options), ThresholdRule(), NAMES)


def arrays(data):
    return dict(zip(data.models, data.logits, strict=True))


def test_lists_frames_and_masks_are_as_good_as_arrays():
    pd = pytest.importorskip("pandas")
    policy, data = policy_of(ragged=True), chain(shift=2, ragged=True)
    predictions = policy.predict(arrays(data))
    table = predictions.to_arrow()
    lists = {name: [row[np.isfinite(row)].tolist() for row in z] for name, z in arrays(data).items()}
    masked = {name: np.where(np.isfinite(z), z, -1e9).astype(np.float64) for name, z in arrays(data).items()}
    frames = {name: pd.DataFrame(z, columns=list("abcde"), index=range(9, 9 + len(z))) for name, z in masked.items()}
    for logits in (lists, masked, frames):
        assert policy.predict(logits).to_arrow().equals(table)
    with pytest.raises(DataError, match="columns"):
        policy.predict({**frames, "m1": frames["m1"][list("edcba")]})
    frame = predictions.to_pandas()
    assert frame.columns.tolist() == ["example_id", "prediction", "confidence", "stage", "cost"]
    assert frame.example_id.tolist() == [str(row) for row in range(len(data))]


def test_notebooks_show_policies_and_predictions_with_names_escaped():
    data = chain()
    named = replace(data, models=("<b>a</b>", "m&m", "c"))
    policy = fit_policy("rf", named, None, ThresholdRule(threshold=0.8), NAMES)
    for result in (policy, policy.predict(dict(zip(named.models, data.logits, strict=True)))):
        html, lines = result._repr_html_(), repr(result).splitlines()
        assert html.startswith("<table>")
        assert "&lt;b&gt;a&lt;/b&gt;" in html
        assert "<b>a" not in html
        assert {line.split()[0] for line in lines[2:]} == set(named.models)
