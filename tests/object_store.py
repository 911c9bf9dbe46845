"""A local S3 server, reached as any other: by the endpoint and credentials of the environment."""

import os
import uuid
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def s3():
    """Start the server. Returns the URI of a bucket."""
    pytest.importorskip("moto.server")
    from jobs.faults.store import object_store

    with mock.patch.dict(os.environ), object_store("bucket") as uri:
        yield uri


@pytest.fixture(params=["local", "s3"])
def folder(request, tmp_path):
    """Return an empty folder: local and on S3; by indirect parameters also "memory", which fsspec alone has."""
    from cauc_ray.files.paths import path_of

    if request.param == "local":
        return tmp_path
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory://bucket"
    return path_of(f"{root}/{uuid.uuid4().hex}")
