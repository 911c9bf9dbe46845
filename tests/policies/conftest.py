"""What tests of policies share."""

import pytest

from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf


@pytest.fixture(scope="session", params=[fit_base, fit_rf], ids=["base", "rf"])
def fit(request):
    """Return the fit of each method of the paper."""
    return request.param
