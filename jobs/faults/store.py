"""An object store, at a distance, for inputs and outputs that every node can reach."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def object_store(bucket: str, away_s: float = 0.0) -> Iterator[str]:
    """Serve an S3 store for the length of the block, which the environment then names. Yields the URI of a bucket.

    Args:
        bucket: The bucket's name.
        away_s: Seconds that are added to each request.
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    near = DomainDispatcherApplication(create_backend_app)

    def far(request: dict[str, Any], start: Callable[..., Any]) -> Any:
        time.sleep(away_s)
        return near(request, start)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, far, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(
        AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{server.port}",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
    )
    from pyarrow.fs import FileSystem

    uri = f"s3://{bucket}"
    FileSystem.from_uri(f"{uri}?allow_bucket_creation=true")[0].create_dir(bucket)
    try:
        yield uri
    finally:
        server.shutdown()
