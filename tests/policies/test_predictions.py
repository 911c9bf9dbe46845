"""Predictions from arrays: what holds the numbers, what is refused, and what notebooks show."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax
from synthetic import chain

from cauc_ray.errors import ConfigError, DataError
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


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (lambda z: None, ConfigError, "m1"),
        (lambda z: z[:-1], DataError, "shape"),
        (lambda z: np.where(np.arange(5) == 3, np.nan, z), DataError, "example '0'"),
        (lambda z: softmax(z, axis=1), DataError, "--logit-kind"),
    ],
)
def test_arrays_that_are_not_logits_are_refused_in_one_line(bad, error, words):
    logits = arrays(chain(shift=2))
    logits["m1"] = bad(logits["m1"])
    with pytest.raises(error) as raised:
        policy_of().predict({name: z for name, z in logits.items() if z is not None})
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


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
