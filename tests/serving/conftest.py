"""A saved chain that is served by the local shell, for tests of its doors."""

import pytest
from asking import Chain

import cauc_ray


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return Chain(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def service(chain):
    with cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, grpc_port=0, name="six", local=True) as running:
        yield running
