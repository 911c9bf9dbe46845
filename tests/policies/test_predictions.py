"""Policies answer arrays as they answer everything else, and notebooks show the answers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from synthetic import chain

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.policies.by_method import fit_policy
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

NAMES = ("calibration", "validation")


def policy_of(method="rf", **options):
    return fit_policy(method, chain(**options), chain(shift=1, **options), ThresholdRule(), NAMES)


def arrays(data):
    return dict(zip(data.models, data.logits, strict=True))


@given(seed=st.integers(0, 99), method=st.sampled_from(["base", "rf"]), ragged=st.booleans())
def test_predictions_are_the_replay_in_the_order_of_the_arrays(seed, method, ragged):
    policy, data = policy_of(method, seed=seed, n=60, ragged=ragged), chain(seed, 60, shift=2, ragged=ragged)
    found, expected = policy.predict(arrays(data)), replay(policy, data)
    np.testing.assert_array_equal(found.prediction, expected.predictions)
    np.testing.assert_array_equal(found.confidence, expected.confidences)
    np.testing.assert_array_equal(found.stage, expected.stages)
    np.testing.assert_array_equal(found.cost, expected.costs)
    order = np.random.default_rng(seed).permutation(len(data))
    again = policy.predict({name: z[order] for name, z in arrays(data).items()})
    np.testing.assert_array_equal(again.confidence, found.confidence[order])


def test_lists_frames_and_masks_are_as_good_as_arrays():
    pd = pytest.importorskip("pandas")
    policy, data = policy_of(ragged=True), chain(shift=2, ragged=True)
    expected = policy.predict(arrays(data)).to_arrow()
    lists = {name: [row[np.isfinite(row)].tolist() for row in z] for name, z in arrays(data).items()}
    masked = {name: np.where(np.isfinite(z), z, -1e9).astype(np.float64) for name, z in arrays(data).items()}
    frames = {name: pd.DataFrame(z, columns=list("abcde"), index=range(9, 9 + len(z))) for name, z in masked.items()}
    for given_ in (lists, masked, frames):
        assert policy.predict(given_).to_arrow().equals(expected)
    swapped = {**frames, "m1": frames["m1"][list("edcba")]}
    with pytest.raises(DataError, match="columns"):
        policy.predict(swapped)


def test_a_table_of_predictions_is_that_of_a_file():
    policy, data = policy_of(), chain(shift=2)
    found = policy.predict(arrays(data))
    frame = found.to_pandas()
    assert frame.columns.tolist() == ["example_id", "prediction", "confidence", "stage", "cost"]
    assert frame.example_id.tolist() == [str(row) for row in range(len(data))]
    assert len(found) == len(frame) == len(data)


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (lambda z: None, ConfigError, "unknown model 'm1'"),
        (lambda z: z[:-1], DataError, "shape"),
        (lambda z: z[:, 0], DataError, "(N, K)"),
        (lambda z: [["a", "b"]], DataError, "not numbers"),
        (lambda z: np.where(np.arange(5) == 3, np.nan, z), DataError, "example '0'"),
        (lambda z: softmax(z, axis=1), DataError, "--logit-kind"),
    ],
)
def test_arrays_that_do_not_serve_are_refused(bad, error, says):
    z = arrays(chain(shift=2))
    z = {name: other for name, own in z.items() if (other := bad(own) if name == "m1" else own) is not None}
    with pytest.raises(error) as raised:
        policy_of().predict(z)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_notebooks_show_policies_and_predictions_with_names_escaped():
    data = chain()
    named = replace(data, models=("<b>a</b>", "m&m", "c"))
    policy = fit_policy("rf", named, None, ThresholdRule(threshold=0.8), NAMES)
    found = policy.predict(dict(zip(named.models, data.logits, strict=True)))
    for shown in (policy._repr_html_(), found._repr_html_()):
        assert shown.startswith("<table>")
        assert "&lt;b&gt;a&lt;/b&gt;" in shown
        assert "m&amp;m" in shown
        assert "<b>a" not in shown
    for shown in (policy, found):
        lines = repr(shown).splitlines()
        assert len(lines) == 2 + len(named.models)
        assert {line.split()[0] for line in lines[2:]} == set(named.models)
        assert str(shown) == repr(shown)
