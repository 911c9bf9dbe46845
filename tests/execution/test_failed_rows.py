"""Rows that models fail on: how many a run takes, and trying them again."""

import json
import re

import pyarrow.parquet as pq
import pytest
from runs import SOUND, numbered_input, python_pool, ranked, rows_of, two_model_policy

import cauc_ray
from cauc_ray.execution import runner

pytestmark = pytest.mark.usefixtures("ray_session")
POLICY = two_model_policy()


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(runner, "BLOCK_ROWS", 64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ray_session):
    """What a run of 200 rows ends with if nothing fails."""
    folder = tmp_path_factory.mktemp("whole")
    cauc_ray.run(python_pool(folder), POLICY, numbered_input(folder, 200), folder / "out")
    return rows_of(folder / "out")


def pool_failing_below(folder, limit, **pool):
    """Write a pool whose first model fails on the rows with an x below a limit, while folder/mended is not there."""
    path = python_pool(folder, [("fails_below", {"limit": limit, "path": str(folder / "mended")}), SOUND[1]])
    path.write_text(path.read_text() + "".join(f"{key}: {value}\n" for key, value in pool.items()))
    return path


def retried(pool, inputs, out):
    """Return the summary of a run that is gone on with and tries failed rows again."""
    return cauc_ray.run(pool, POLICY, inputs, out, resume=True, retry_failed=True)


@pytest.mark.slow
def test_more_failed_rows_than_a_pool_allows_end_the_run_with_one_line(tmp_path, command):
    POLICY.save(tmp_path / "policy.json")
    # 110 of 400 rows.
    arguments = ["--policy", tmp_path / "policy.json", "--input", numbered_input(tmp_path, 400), "-o", tmp_path / "out"]
    code, out, err = command("run", pool_failing_below(tmp_path, -0.9), *arguments)
    assert (code, out, len(re.sub(r"cauc: starting .*\n", "", err).splitlines())) == (2, "", 1)
    assert int(re.search(r"(\d+) of", err).group(1)) > 100  # some more may fail before anybody looks
    assert all(part in err for part in ("'small'", "no kernel image", "max_failed", "--retry-failed"))
    assert not (tmp_path / "out" / "summary.json").exists()
    # A pool that allows more goes on with the run; its failed rows are in failed/.
    resume = ["--resume"] if (tmp_path / "out").exists() else []  # nothing is left where nothing was written yet
    code, out, err = command("run", pool_failing_below(tmp_path, -0.9, max_failed=0.5), *arguments, *resume, "--json")
    assert code == 5, err  # with a warning of the guard: rows cost other than the policy expects
    answered, failed = rows_of(tmp_path / "out")
    assert (len(failed), len(answered) + len(failed), json.loads(out)["n_failed"]) == (110, 400, 110)
    # The first pool does not take what is there for a finished run.
    (tmp_path / "out" / "summary.json").unlink()
    code, _, err = command("run", pool_failing_below(tmp_path, -0.9), *arguments, "--resume")
    assert code == 2
    assert "110 of 400" in err


@pytest.mark.parametrize("column", ranked(["example_id", "x"], quick=0, slow=1))
def test_rows_that_could_not_be_read_are_tried_again_when_they_can_be(tmp_path, small_blocks, whole, column):
    """Also where the damage took their ids, so that nobody knew their names."""
    inputs, pool = numbered_input(tmp_path, 200), python_pool(tmp_path)
    table = pq.read_table(inputs)
    pq.write_table(table, inputs, row_group_size=50, compression="none", use_dictionary=False)
    sound, place = inputs.read_bytes(), table.column_names.index(column)
    begins = pq.ParquetFile(inputs).metadata.row_group(1).column(place).data_page_offset
    inputs.write_bytes(sound[:begins] + b"\xff" * 16 + sound[begins + 16 :])
    assert 50 <= cauc_ray.run(pool, POLICY, inputs, tmp_path / "out")["n_failed"] < 200
    inputs.write_bytes(sound)
    assert retried(pool, inputs, tmp_path / "out")["n_failed"] == 0
    assert rows_of(tmp_path / "out") == whole
