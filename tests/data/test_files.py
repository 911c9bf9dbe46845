import pytest

from cauc_ray.data.files import write_json, write_text, written_beside
from cauc_ray.errors import ConfigError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "policy.json"
    write_text(path, "old")
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": float("nan")})

    def fail_halfway():
        with written_beside(path) as beside:
            beside.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["policy.json"]


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        write_text(tmp_path / "absent" / "x.json", "")
    with pytest.raises(ConfigError, match="it is a folder"):
        write_text(tmp_path, "")
