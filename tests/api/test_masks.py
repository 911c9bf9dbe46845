"""A table with masks gives what the same table with -inf gives, to the last bit, whatever reads it."""

import json
import shutil

import numpy as np
import pytest
from masked import MASKS, MODELS, splits, write, write_masked

import cauc_ray
from cauc_ray.errors import CaucError, DataError

CHAIN = ["--models", ",".join(MODELS)]
LOWEST = float(np.finfo(np.float32).min)
FITS = {
    "base": ["--method", "base"],
    "rf": ["--method", "rf", "--budget", "3"],
    "isotonic": ["--method", "base", "--calibrator", "isotonic"],
    "safe": ["--method", "rf", "--budget", "3", "--safe"],
    "search": ["--method", "rf", "--budget", "3", "--search"],
    "certify": ["--method", "base", "--certify", "risk<=0.4@0.9"],
}


@pytest.fixture(scope="module")
def chains():
    return splits()


@pytest.fixture
def table(tmp_path, chains):
    """Return a function that puts the chains with some mask into the folder LOGITS."""

    def put(mask):
        folder = tmp_path / "LOGITS"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return write_masked(folder, chains, mask)

    return put


def everything(command, tmp_path):
    """Return what each verb says of the table in LOGITS."""
    said = {}
    for name, options in FITS.items():
        said[name] = command("fit", "LOGITS", *CHAIN, *options, "-o", f"{name}.json")
        assert said[name][0] == 0, said[name]
        said[f"{name} policy"] = (tmp_path / f"{name}.json").read_bytes()
    for name in ("base", "rf"):
        policy = ["--policy", f"{name}.json", "--json"]
        said[f"evaluate {name}"] = command("evaluate", "LOGITS", *policy, "--predictions", "p.parquet")
        said[f"predictions {name}"] = (tmp_path / "p.parquet").read_bytes()
        said[f"check {name}"] = command("check", "LOGITS", *policy)
        assert all(said[f"{verb} {name}"][1].startswith("{") for verb in ("evaluate", "check"))
    said["sweep"] = command("sweep", "LOGITS", *CHAIN, "-o", "sweep.parquet", "--json")
    said["swept"] = (tmp_path / "sweep.parquet").read_bytes()
    return said


def test_fits_replays_checks_and_sweeps_are_those_of_missing_options(command, tmp_path, table):
    table(-np.inf)
    expected = everything(command, tmp_path)
    assert json.loads(expected["rf policy"])["stages"][0]["diagnostics"]["status"] == "converged"
    for mask in (-1e4, LOWEST):
        table(mask)
        for what, found in everything(command, tmp_path).items():
            assert found == expected[what], (mask, what)


# What trains takes long, and sees of logits no more than the others.
QUICK = ["single", "base", "rf", "duo", "margin", "max-probability", "routellm-sw", "benchmark-routing"]


def compared(folder, methods):
    """Return what a comparison says, but for the seconds that it took."""
    found = cauc_ray.compare(folder, models=MODELS, methods=methods)
    rows = [{key: value for key, value in row.items() if not key.startswith("setup_")} for row in found.rows]
    return rows, found.curves


@pytest.mark.parametrize("methods", [pytest.param(["all"], marks=pytest.mark.slow), QUICK], ids=["all", "quick"])
def test_methods_side_by_side_are_those_of_missing_options(table, methods):
    rows, curves = compared(table(-np.inf), methods)
    for mask in (-1e4, LOWEST) if methods == ["all"] else (LOWEST,):
        own_rows, own_curves = compared(table(mask), methods)
        assert own_rows == rows
        assert own_curves.equals(curves)


def test_offsets_and_labels_find_a_masked_option_missing(tmp_path, chains):
    """What is refused with -inf is refused with a mask, in the same words."""
    said = []
    for name, mask in (("a", -np.inf), ("b", -1e9)):
        folder = tmp_path / name / "LOGITS"
        folder.mkdir(parents=True)
        write_masked(folder, chains, mask)
        with pytest.raises(CaucError) as error:
            cauc_ray.fit(folder, models=MODELS, calibrator="offsets")
        said.append(str(error.value).replace(str(folder), "LOGITS"))
    assert said[0] == said[1]


@pytest.mark.parametrize("mask", [-np.inf, *MASKS])
def test_a_label_that_points_at_a_masked_option_is_refused(tmp_path, chains, mask):
    def without_the_first_label(logits):
        cut = logits.copy()
        cut[0, chains["calibration"].labels[0]] = mask
        return cut

    folder = write(tmp_path, {"calibration": chains["calibration"]}, without_the_first_label)
    example = f"calibration-{chains['calibration'].example_ids[0]}"
    with pytest.raises(DataError, match=rf"{example}.*label.*mask"):
        cauc_ray.fit(folder, models=MODELS)


def test_an_example_that_masks_leave_without_a_common_option_is_refused(tmp_path, chains):
    place = iter(range(100))

    def one_option(logits):
        cut = np.where(np.isneginf(logits), np.float32(-1e9), logits)
        model = next(place) % 2
        cut[3] = -1e9
        cut[3, model] = 1.0
        return cut

    test = chains["test"]
    unlabelled = {"test": type(test)(**{**test.__dict__, "labels": np.full(len(test), -1, np.int32)})}
    folder = write(tmp_path / "LOGITS", unlabelled, one_option)
    policy = cauc_ray.fit(write_masked(tmp_path / "FIT", chains, -1e9), models=MODELS)
    with pytest.raises(DataError, match="no option that is possible for all models"):
        cauc_ray.evaluate(folder, policy)


def test_a_step_from_arrays_takes_masks_for_missing_options(tmp_path, chains):
    folder = write_masked(tmp_path, chains, -np.inf)
    for method in ("base", "rf"):
        policy = cauc_ray.fit(folder, models=MODELS, method=method, threshold=0.7)
        states = dict.fromkeys((-np.inf, *MASKS))
        for stage, logits in enumerate(chains["test"].logits):
            steps = {
                mask: policy.step(stage, np.where(np.isneginf(logits), np.float32(mask), logits), state)
                for mask, state in states.items()
            }
            for step in steps.values():
                expected = steps[-np.inf]
                assert np.array_equal(step.confidences, expected.confidences)
                assert np.array_equal(step.predictions, expected.predictions)
                assert np.array_equal(step.state, expected.state)
            states = {mask: step.state for mask, step in steps.items()}
