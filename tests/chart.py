"""The chart in deployments/chart, rendered by Helm's own library."""

from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).parents[1] / "deployments" / "chart"
NAME, NAMESPACE = "cauc", "cascades"
# Where each kind of release has the spec of its RayCluster.
KINDS = {
    "service": ("RayService", "rayClusterConfig"),
    "job": ("RayJob", "rayClusterSpec"),
    "cluster": ("RayCluster", ""),
}


def rendered(**values):
    """Return the objects of a release. Raises helm_python.HelmError where its values do not fit."""
    helm = pytest.importorskip("helm_python", reason="Helm (pip install helm-python-sdk) is not here")
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name=NAME, namespace=NAMESPACE)
    return [one for path, text in files.items() if path.endswith(".yaml") for one in yaml.safe_load_all(text) if one]


def of_kind(objects, kind):
    return [one for one in objects if one["kind"] == kind]


def ray_object(kind, **values):
    """Return the RayService, RayJob or RayCluster of a release of a kind."""
    (manifest,) = of_kind(rendered(kind=kind, **values), KINDS[kind][0])
    return manifest


def cluster_of(kind, manifest):
    """Return the spec of the cluster in a RayService, RayJob or RayCluster."""
    field = KINDS[kind][1]
    return manifest["spec"][field] if field else manifest["spec"]


def groups_of(kind, **values):
    """Return the head's group and those of the workers."""
    cluster = cluster_of(kind, ray_object(kind, **values))
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
