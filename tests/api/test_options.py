"""Options of public functions: every one is described, and a value of another type is refused by its name."""

import inspect
import pickle
from contextlib import suppress

import pytest

import cauc_ray
from cauc_ray.api.options import options_of
from cauc_ray.errors import ConfigError

FUNCTIONS = [
    *(cauc_ray.fit, cauc_ray.evaluate, cauc_ray.check, cauc_ray.compare, cauc_ray.collect, cauc_ray.run),
    *(cauc_ray.serve, cauc_ray.set_policy, cauc_ray.plan),
]
OPTIONS = [(function, name) for function in FUNCTIONS for name in options_of(function).model_fields]


@pytest.mark.parametrize(("function", "name"), OPTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_a_value_of_another_type_is_refused_by_the_options_name(function, name):
    parameters = inspect.signature(function).parameters.values()
    required = {parameter.name: 1 for parameter in parameters if parameter.default is parameter.empty}
    with pytest.raises(ConfigError, match=rf"^{name}: [^\n]*$"):
        function(**{**required, name: object()})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda value: value.__name__)
def test_a_boolean_is_not_taken_as_a_number(function):
    options = options_of(function)
    required = {name: "5" for name, field in options.model_fields.items() if field.is_required()}
    for name in options.model_fields:
        for value in (True, [True], {"x": True}):
            with suppress(ConfigError):
                assert getattr(options.of({**required, name: value}), name) is True


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda value: value.__name__)
def test_defaults_are_those_of_the_signature_and_every_option_is_described(function):
    parameters = inspect.signature(function).parameters
    for name, field in options_of(function).model_fields.items():
        assert field.description
        assert field.is_required() or field.default == parameters[name].default


def test_checked_options_reach_other_processes():
    options = options_of(cauc_ray.fit).of({"models": ["a", "b"], "method": "rf", "budget": 3})
    copied = pickle.loads(pickle.dumps(options))
    assert (copied, copied.threshold_rule, copied.splits) == (options, options.threshold_rule, options.splits)
