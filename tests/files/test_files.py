import sys

import pyarrow as pa
import pytest

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.files.documents import atomic_file, make_folder, read_json, require_writable, write_json, write_text
from cauc_ray.files.parquet import parquet_files, read_parquet, write_parquet
from cauc_ray.files.paths import content_digest, list_files, path_inside, path_of, visible

EVERYWHERE = pytest.mark.parametrize("folder", ["local", "s3", "memory"], indirect=True)


@EVERYWHERE
def test_a_failed_write_leaves_the_old_file_and_nothing_else(folder):
    path = folder / "policy.json"
    write_text(path, "old")
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": float("nan")})

    def fail_halfway():
        with atomic_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert path.read_text() == "old"
    assert [p.name for p in folder.iterdir()] == ["policy.json"]
    write_json(path, {"a": "é"})
    assert read_json(path) == {"a": "é"}


@EVERYWHERE
def test_a_folder_is_listed_without_hidden_files_and_its_digest_follows_names_and_bytes(folder):
    make_folder(folder / "b" / "c")
    make_folder(folder / ".hidden")
    for name in ("b/c/2.parquet", "b/1.parquet", "b.txt", ".hidden/3.parquet", "b/.part"):
        (folder / name).write_bytes(name.encode())
    below = ["b/1.parquet", "b/c/2.parquet", "b.txt"]
    assert [path_inside(entry.path, folder) for entry in list_files(folder)] == below
    assert [file.name for file in visible(folder)] == ["b", "b.txt"]
    assert [path_inside(file, folder) for file in parquet_files(folder)] == below[:2]
    before = content_digest(folder)
    (folder / "b" / ".part").write_bytes(b"other")
    assert content_digest(folder) == before
    (folder / "b" / "1.parquet").write_bytes(b"other")
    changed = content_digest(folder)
    (folder / "b" / "1.parquet").unlink()
    assert len({before, changed, content_digest(folder)}) == 3
    assert content_digest(folder / "absent") is None
    assert content_digest(folder / "b.txt") == content_digest(path_of(str(folder / "b.txt")))


@EVERYWHERE
def test_what_is_not_there_or_not_readable_is_named(folder):
    for read in (read_json, read_parquet, parquet_files):
        with pytest.raises(DataError, match=r"absent.* does not exist"):
            read(folder / "absent.parquet")
    write_text(folder / "x.json", "no JSON")
    with pytest.raises(DataError, match=r"x\.json is not a readable JSON file"):
        read_json(folder / "x.json")
    write_parquet(folder / "x.parquet", pa.table({"x": list(range(1000))}))
    (folder / "x.parquet").write_bytes((folder / "x.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"x\.parquet is not a readable Parquet file"):
        read_parquet(folder / "x.parquet")
    make_folder(folder / "sub")
    write_text(folder / "sub" / "x.txt", "")
    with pytest.raises(DataError, match=r"there are no \.parquet files in .*sub"):
        parquet_files(folder / "sub")
    with pytest.raises(ConfigError, match="it is a folder"):
        write_text(folder / "sub", "")


def test_a_filesystem_that_is_unknown_is_named_with_the_remedy():
    with pytest.raises(ConfigError, match=r"nowhere://bucket: no filesystem .*s3://"):
        require_writable(path_of("nowhere://bucket/x.json"))


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"hf:// needs a package .*: pip install fsspec huggingface_hub"):
        path_of("hf://datasets/organisation/name").is_dir()
