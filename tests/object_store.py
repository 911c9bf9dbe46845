"""A local S3 server, reached as any other: by the endpoint and credentials of the environment."""

import os
import uuid
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def s3():
    """Start the server. Returns the URI of a bucket."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    with mock.patch.dict(os.environ, settings):
        from pyarrow.fs import FileSystem

        FileSystem.from_uri("s3://bucket?allow_bucket_creation=true")[0].create_dir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["local", "s3"])
def folder(request, tmp_path):
    """Return an empty folder: local and on S3; by indirect parameters also "memory", which fsspec alone has."""
    from cauc_ray.files.paths import path_of

    if request.param == "local":
        return tmp_path
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory://bucket"
    return path_of(f"{root}/{uuid.uuid4().hex}")
