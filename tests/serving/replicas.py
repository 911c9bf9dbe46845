"""What Serve runs, as its controller knows it."""

import ray


def replicas_of(name, application="six"):
    """Return the process ids of a deployment's replicas."""
    from ray.serve._private.api import _get_global_client

    details = ray.get(_get_global_client()._controller.get_serve_instance_details.remote())
    deployment = details["applications"][application]["deployments"][name]
    return [replica["pid"] for replica in deployment["replicas"] if replica["state"] == "RUNNING"]
