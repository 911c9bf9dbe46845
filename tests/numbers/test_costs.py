import numpy as np
import pytest

from cauc_ray.errors import CaucWarning, DataError
from cauc_ray.numbers.costs import Costs


def test_a_cascade_pays_for_every_stage_it_called():
    per_call = np.array([[1.0, 2.0, 4.0], [10.0, 20.0, 40.0]])
    assert Costs("USD", per_call).of_stops(np.array([2, 1])).tolist() == [7.0, 30.0]
    assert Costs("USD", per_call[0]).of_stops(np.array([2, 0, 1])).tolist() == [7.0, 1.0, 3.0]
    assert Costs("USD", per_call).means.tolist() == [5.5, 11.0, 22.0]


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_what_is_no_cost_is_refused(bad):
    with pytest.raises(DataError, match="not a number between 0 and"):
        Costs("USD", np.array([1.0, bad]))


def test_costs_that_do_not_rise_are_named():
    with pytest.warns(CaucWarning, match="'b' costs 1 s, no more than 'a' before it"):
        Costs("s", np.array([2.0, 1.0])).warn_unless_rising(("a", "b"))
