import pytest
from pydantic import ValidationError

from cauc_ray.models.resources import Resources

EDGE, CLOUD, NONE = {"tier": "edge"}, {"tier": "cloud"}, {}


@pytest.mark.parametrize(
    ("labels", "fallback", "met_by", "not_met_by"),
    [
        ("edge", (), [EDGE], [CLOUD, NONE]),
        ("!edge", (), [CLOUD, NONE], [EDGE]),
        ("in(edge, a)", (), [EDGE, {"tier": "a"}], [CLOUD, NONE]),
        ("!in( edge ,a)", (), [CLOUD, NONE], [EDGE, {"tier": "a"}]),
        ("gpu", ({"tier": "edge", "zone": "a"},), [{"tier": "gpu"}, {**EDGE, "zone": "a"}], [EDGE]),
    ],
)
def test_labels_and_fallbacks_are_met_as_ray_has_it(labels, fallback, met_by, not_met_by):
    needs = Resources(labels={"tier": labels}, fallback=fallback)
    assert " " not in needs.labels["tier"]  # Ray takes none
    assert all(map(needs.met_by, met_by))
    assert not any(map(needs.met_by, not_met_by))


def test_amounts_are_by_rays_names():
    needs = Resources(num_cpus=0.5, num_gpus=2, memory="1.5GiB", custom={"licence": 1})
    assert needs.amounts == {"CPU": 0.5, "GPU": 2, "memory": 3 << 29, "licence": 1}
    assert str(needs) == "0.5 CPUs and 2 GPUs and 1.5 GiB of memory and 1 licence"


@pytest.mark.parametrize(
    ("settings", "name", "amount"),
    [
        *(({"num_gpus": n_gpus}, "CPU", n_cpus) for n_gpus, n_cpus in ((0, 1), (0.1, 1), (0.5, 2), (1, 4), (2, 8))),
        *(({"memory": size}, "memory", 1 << 32) for size in (1 << 32, "4294967296", "4GiB", " 4096 MiB ")),
    ],
)
def test_there_are_four_cpus_for_each_gpu_and_memory_may_have_a_unit(settings, name, amount):
    assert Resources.model_validate(settings).amounts[name] == amount


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"num_gpus": 1.5}, "a fraction below 1 or a whole number, got 1.5"),
        ({"custom": {"GPU": 1}}, "'GPU' is not a custom resource"),
        ({"custom": {"licence": 0}}, "greater than 0"),
        ({"labels": {"tier": "in(a"}}, "expected .* got 'in"),
        ({"fallback": [{"tier": "edge"}]}, "fallback needs labels"),
        ({"labels": {"tier": "a"}, "fallback": [{"tier": "a b"}]}, "expected .* got 'a b'"),
        ({"memory": "4 pages"}, "memory"),
        ({"memory": "-1GiB"}, "memory"),
    ],
)
def test_what_no_replica_can_have_is_refused(fault, words):
    with pytest.raises(ValidationError, match=words):
        Resources(**fault)
