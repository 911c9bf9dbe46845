import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Literal

import jsonschema
import numpy as np
import pytest
import yaml
from batches import refused

from cauc_ray.models.answers import Answers
from cauc_ray.models.kind import InputColumns, KindSpec
from cauc_ray.models.kinds import GROUP, RegisteredSpec, built_in_specs, known_kinds
from cauc_ray.models.pool import load_pool
from cauc_ray.schemas import schema_path


class PricedSpec(KindSpec):
    """Settings of a kind of another package."""

    LOADER: ClassVar[str] = f"{__name__}:load_priced"
    SPANS_GPUS: ClassVar[bool] = True
    kind: Literal["priced"]
    depth: int = 1
    columns_read = property(lambda self: InputColumns(frozenset({"x"}), texts=frozenset({"title"})))
    label_names = property(lambda self: ("low", "high"))
    cost_unit = property(lambda self: "USD")


def load_priced(spec, placement):
    def answer(batch):
        n = len(batch["x"])
        logits = np.full((n, 2), spec.depth, np.float32)
        return Answers(logits, costs=np.full(n, placement.num_gpus + 0.5), cost_unit="USD")

    return answer


def echo(**settings):
    def answer(batch):
        return [[0.0]] * len(batch["x"])

    answer.settings = settings
    return answer


KINDS = {
    "echo": f"{__name__}:echo",
    "absent-function": "builtins:absent",
    "needs-a-package": "a_package_that_is_not_there:load",
    "breaks": "breaks:load",
    "python": "builtins:dict",
    "priced": f"{__name__}:PricedSpec",
}


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """Install a package that registers kinds, as pip would leave it."""
    info = tmp_path / "site" / "other_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in KINDS.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    (tmp_path / "site" / "breaks.py").write_text("raise ValueError('the licence\\nhas ended')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def pool_file(folder, **model):
    stage = {"name": "s", "model": model}
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump({"name": "p", "task": "image-classification", "stages": [stage]}))
    return path


def loaded(folder, **model):
    return load_pool(pool_file(folder, **model)).stage("s").model.load()


def test_the_published_schema_takes_built_in_and_registered_kinds(tmp_path):
    schema = json.loads(schema_path("pool").read_text())
    published = jsonschema.validators.validator_for(schema)(schema)
    saved = {"kind": "saved", "logits": "L", "model": "m", "split": "test"}
    for model in (saved, {"kind": "echo", "value": 3}):
        assert published.is_valid(yaml.safe_load(pool_file(tmp_path, **model).read_text()))
    assert not published.is_valid(yaml.safe_load(pool_file(tmp_path, **saved, splot="x").read_text()))


@pytest.mark.usefixtures("other_package")
def test_what_stands_beside_the_kind_reaches_the_factory(tmp_path):
    # Also where a spec's own methods and fields have its name.
    settings = {"model_name": "x", "load": 3, "located": None, "cost_unit": "USD", "nested": {"a": [1, {"b": 2.0}]}}
    spec = load_pool(pool_file(tmp_path, kind="echo", **settings)).stage("s").model
    assert spec.cost_unit is None
    assert spec.load().function.settings == settings
    identity = RegisteredSpec(kind="elsewhere", depth=3).identity
    assert RegisteredSpec(kind="elsewhere", depth=3, device="cpu", logit_kind="probabilities").identity == identity
    assert RegisteredSpec(kind="elsewhere", depth=4).identity != identity


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"kind": "absent-function"}, "has no attribute 'absent'"),
        ({"kind": "needs-a-package"}, "a_package_that_is_not_there"),
        ({"kind": "breaks"}, "the licence has ended"),
        ({"kind": "ecko"}, "unknown kind 'ecko'; did you mean 'echo'?"),
        ({"kind": "priced", "depth": "deep"}, "stages.0.model.depth: input should be a valid integer"),
        ({"kind": "python"}, "factory"),  # a built-in kind is not replaced
    ],
)
@pytest.mark.usefixtures("other_package")
def test_faults_of_a_registered_kind_are_one_line(tmp_path, model, words):
    assert words in refused(lambda: loaded(tmp_path, **model))


class LazySpec(KindSpec):
    LOADER = "lazy_kind:load"
    PACKAGES = ("", "lazy_package")


def test_threads_that_load_models_of_a_package_at_once_all_get_it(tmp_path, monkeypatch):
    """A package may replace its module while it is imported, as transformers does."""
    lazy = "import sys, time, types\ntime.sleep(0.3)\nlazy = types.ModuleType(__name__)\nlazy.__spec__ = __spec__\n"
    (tmp_path / "lazy_package.py").write_text(f"{lazy}lazy.model = 'model'\nsys.modules[__name__] = lazy\n")
    (tmp_path / "lazy_kind.py").write_text("def load(*_):\n    from lazy_package import model\n    return model\n")
    monkeypatch.syspath_prepend(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(KindSpec.load, 4 * [LazySpec(kind="lazy")])] == 4 * ["model"]


def test_a_kind_that_is_not_installed_where_the_model_runs_is_named(tmp_path, other_package, monkeypatch):
    assert sorted(known_kinds()) == sorted({*built_in_specs(), *KINDS})
    spec = load_pool(pool_file(tmp_path, kind="echo")).stage("s").model
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(other_package)])
    importlib.invalidate_caches()
    assert "unknown kind 'echo'" in refused(spec.load)


@pytest.mark.usefixtures("other_package")
def test_settings_of_another_package_have_the_rights_of_built_in_ones(tmp_path):
    pool = load_pool(pool_file(tmp_path, kind="priced", depth=3))
    stage = pool.stage("s")
    assert pool.columns_read(pool.stages) == {"example_id", "label", "choices", "x"}
    assert pool.label_names == ("low", "high")
    assert stage.model.cost_unit == "USD"
    spread = stage.model_copy(update={"resources": stage.resources.model_copy(update={"num_gpus": 2})})
    answers = spread.load()({"x": np.zeros(1)})
    assert answers.logits.tolist() == [[3.0, 3.0]]
    assert answers.costs.tolist() == [2.5]
