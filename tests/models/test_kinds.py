"""The contract of a model kind, once for every kind that a pool file may name; other files hold what is particular."""

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import fake_vllm
import numpy as np
import pytest
import torch
from batches import column, encoded
from completion_server import chat_answer, scripted_server
from language_models import tiny_language_model
from PIL import Image
from safetensors.torch import load_file, save_file
from strict_server import logits_of, strict_server
from synthetic import write_table
from tiny_networks import image_network, saved, text_classifier
from torchvision import models as torchvision_models

from cauc_ray.errors import CaucError, ConfigError, DataError
from cauc_ray.models.answers import EMBEDDING
from cauc_ray.models.kind import Placement
from cauc_ray.models.kinds import built_in_specs
from cauc_ray.models.pool import StageSpec, pool_of
from cauc_ray.numbers.logits import kind_of

# In units of a batch's spread: what float32 sums in another order may change.
ROUNDING = 1e-3
LABELS = {"billing": "about invoices", "bug": "", "other": ""}


@dataclass
class Case:
    """A small model of a kind.

    Attributes:
        settings: Of the model, as a pool file has them.
        columns: Six rows of input.
        unreadable: A value of the first column that makes its row fail alone.
        logit_kind: Of its answers.
        labels: Names of its options, where it knows them.
        bills: Whether its calls report costs.
        same: Values of settings that change no answer.
        different: Values of settings that change answers, or what is asked.
        refused: Changed settings, and words of the line that refuses them when the pool is read or the model loaded.
        broken: Settings of a model of this kind whose numbers are NaN.
    """

    settings: dict[str, Any]
    columns: dict[str, Any]
    unreadable: Any = None
    logit_kind: str = "raw"
    labels: tuple[str, ...] | None = None
    bills: bool = False
    same: dict[str, Any] = field(default_factory=dict)
    different: dict[str, Any] = field(default_factory=dict)
    refused: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    broken: dict[str, Any] | None = None
    folder: Path = Path()
    model: Any = None

    def stage(self, **changes: Any) -> StageSpec:
        """Return a stage with this model, some settings changed."""
        stage = {"name": "s", "model": {**self.settings, **changes}}
        return pool_of({"name": "p", "task": "classification", "stages": [stage]}, self.folder).stages[0]

    def batch(self, rows: Any = slice(None)) -> dict[str, np.ndarray]:
        """Return some of the rows."""
        return {name: values[rows] for name, values in self.columns.items()}


def images() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    sizes = [(40 + 9 * row, 30, 3) for row in range(6)]
    return {"image": column(encoded(Image.fromarray(rng.integers(0, 256, size, np.uint8))) for size in sizes)}


def texts() -> dict[str, np.ndarray]:
    return {"text": column(["It broke", "Why was I charged twice?", "thanks " * 30, "x", "Pay me now", "Hello there"])}


NO_FOLDER, NO_HUB = ({"model": "/absent"}, "does not exist"), ({"model": "org/absent"}, "cannot be loaded")
NO_COLUMN = ({"prompt": "Which one?"}, "prompt reads no column")
ONE_LABEL = ({"labels": ["one"]}, "labels")
ASKED = {"labels": LABELS, "prompt": "Ticket: {{ text }}"}
ASKED_OTHERWISE = {"prompt": "Request: {{ text }}", "labels": ["billing", "bug", "else"]}
ASKED_OTHERWISE |= {"examples": [{"text": "Pay me", "label": "bug"}]}
# Settings of what is asked, which policies keep.
SHOWN = {*ASKED_OTHERWISE, "options", "system", "instructions", "question"}


@cache
def tokenizer() -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = tiny_language_model(Path(folder)).tokenizer
    made.pad_token = made.eos_token
    return made


def save(folder: Path, *parts: Any) -> dict[str, Any]:
    """Save a network and what reads its inputs in a folder; return the settings of the same with NaN for weights."""
    for name in ("m", "nan"):
        saved(folder / name, *parts)
    weights = load_file(folder / "m" / "model.safetensors")
    nan = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    save_file(nan, folder / "nan" / "model.safetensors", {"format": "pt"})
    return {"model": "nan"}


def python(folder: Path, stack: ExitStack) -> Case:
    settings = {"kind": "python", "factory": "user_models:by_x", "kwargs": {"factor": 2.0}}
    wrong = [({"factory": name}, "factory") for name in ("user_models:absent", "absent_module:load", "no colon")]
    wrong.append(({"factory": "user_models:no_callable"}, "not callable"))
    case = Case(settings, {"x": np.arange(1.0, 7)}, same={"logit_kind": "surrogate"}, refused=wrong)
    case.different = {"factory": "user_models:ragged", "kwargs": {"factor": 3.0}}
    case.broken = {"kwargs": {"factor": float("nan")}, "logit_kind": "raw"}
    return case


def saved_logits(folder: Path, stack: ExitStack) -> Case:
    chain = write_table(folder / "L", n=6, per_call=True)["test"]
    rows = {"example_id": column(f"test-{example}" for example in chain.example_ids)}
    case = Case({"kind": "saved", "logits": "L", "model": "m1", "split": "test"}, rows, "nobody", bills=True)
    case.refused = [({"logits": "absent"}, "absent"), ({"model": "m9"}, "m9"), ({"split": "dev"}, "dev")]
    case.same = {"seconds_per_call": 0.1, "seconds_per_row": 0.1, "logit_kind": "surrogate"}
    case.different = {"model": "m0", "split": "validation"}
    return case


def onnx(folder: Path, stack: ExitStack) -> Case:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    ends = [
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", n])] for name, n in (("x", 2), ("y", 3))
    ]
    weights = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    for name, values in (("m.onnx", weights), ("nan.onnx", weights * np.float32("nan"))):
        nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])]
        graph = onnx.helper.make_graph(nodes, "g", *ends, [onnx.numpy_helper.from_array(values, "w")])
        opset = [onnx.helper.make_opsetid("", 19)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), str(folder / name))
    (folder / "broken.onnx").write_bytes(b"no graph")
    (folder / "tokenizer.json").write_text(json.dumps({"no": "tokenizer"}))
    wrong = [({"model": "absent.onnx"}, "does not exist"), ({"model": "broken.onnx"}, "cannot be loaded")]
    wrong += [({"output": "logit"}, "no output 'logit'; it has y"), ({"image": {"size": 0}}, "image.size")]
    wrong += [({"columns": [], "tokenizer": "tokenizer.json"}, "is not a tokenizer.json")]
    rows = {"age": column(range(20, 80, 10)), "income": np.arange(6.0)}
    case = Case({"kind": "onnx", "model": "m.onnx", "columns": ["age", "income"]}, rows, refused=wrong)
    case.same = {"device": "cpu", "logit_kind": "surrogate"}
    case.different, case.broken = {"columns": ["income", "age"]}, {"model": "nan.onnx"}
    return case


def sklearn(folder: Path, stack: ExitStack) -> Case:
    joblib = pytest.importorskip("joblib")
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import SVC

    features = np.random.default_rng(0).normal(size=(300, 2))
    answers = np.array(["other", "billing", "bug"])[np.digitize(features.sum(axis=1), [-0.8, 0.8])]
    estimators = {name: LogisticRegression().fit(features, answers) for name in ("m", "nan")}
    estimators["nan"].coef_ *= np.nan
    estimators |= {"svc": SVC().fit(features, answers), "dict": {"no": "estimator"}}
    for name, estimator in estimators.items():
        joblib.dump(estimator, folder / f"{name}.joblib")
    (folder / "broken.joblib").write_bytes(b"no pickle")
    wrong = [({"path": "absent.joblib"}, "does not exist"), ({"path": "broken.joblib"}, "cannot be loaded")]
    wrong += [({"path": "dict.joblib"}, "holds dict without classes_")]
    wrong += [({"path": "svc.joblib"}, "declare logit_kind: surrogate")]
    wrong += [({"labels": ["a", "bug", "other"]}, "the pool has")]
    settings = {"kind": "sklearn", "path": "m.joblib", "columns": ["age", "income"], "labels": [*LABELS]}
    rows = {"age": column(range(-3, 3)), "income": np.arange(6.0) / 3}
    case = Case(settings, rows, logit_kind="probabilities", labels=tuple(LABELS), refused=wrong)
    case.same, case.broken = {"logit_kind": "probabilities"}, {"path": "nan.joblib"}
    case.different = {"columns": ["income", "age"], "labels": ["bug", "billing", "other"]}
    return case


def torchvision(folder: Path, stack: ExitStack) -> Case:
    torch.manual_seed(0)
    network = torchvision_models.squeezenet1_1(weights=None, num_classes=5)
    save_file(network.state_dict(), folder / "w.safetensors")
    save_file({name: w * torch.nan for name, w in network.state_dict().items()}, folder / "nan.safetensors")
    torch.save([1, 2], folder / "list.pth")
    torch.save(network, folder / "module.pth")  # a pickle, which would run what it likes
    whole = (folder / "w.safetensors").read_bytes()
    damaged = {"words.pth": b"no weights at all\n", "empty.pth": b"", "half.safetensors": whole[:9000]}
    for name, content in damaged.items():
        (folder / name).write_bytes(content)
    wrong = [
        ({"arch": "resnet-50"}, "unknown arch 'resnet-50'; did you mean 'resnet50'?"),
        ({"arch": "fasterrcnn_resnet50_fpn"}, "unknown arch"),  # a detector
        ({"weights": "IMAGENET1K_V3"}, "unknown weights 'IMAGENET1K_V3'; did you mean 'IMAGENET1K_V1'"),
        ({"weights": "absent.pth"}, "absent.pth does not exist"),
        *(({"weights": name}, "is not a readable weight file") for name in (*damaged, "module.pth")),
        ({"weights": "list.pth"}, "has no named weights"),
        ({"arch": "squeezenet1_0"}, "does not fit squeezenet1_0: "),
        ({"arch": "resnet18"}, "has no fc.weight"),
    ]
    settings = {"kind": "torchvision", "arch": "squeezenet1_1", "weights": "w.safetensors"}
    case = Case(settings, images(), b"no image", same={"device": "cpu"}, refused=wrong)
    case.different, case.broken = {"arch": "squeezenet1_0"}, {"weights": "nan.safetensors"}
    return case


def image_kind(kind: str, family: str, labels: Any = None, **more: Any) -> Callable[[Path, ExitStack], Case]:
    """Return what makes a case of a network of images in transformers."""

    def made(folder: Path, stack: ExitStack) -> Case:
        broken = save(folder, *image_network(family, id2label=dict(enumerate(labels or "ab"))))
        (folder / "empty").mkdir()
        wrong = [NO_FOLDER, NO_HUB, ({"model": "empty"}, "cannot be loaded")]
        for name in ("truncated", "narrower", "deeper"):
            shutil.copytree(folder / "m", folder / name)
        os.truncate(folder / "truncated" / "model.safetensors", 3000)
        wrong.append(({"model": "truncated"}, "cannot be loaded"))
        for name, size, words in (
            ("narrower", {"intermediate_size": 48}, "has shape (64,) in the file, (48,) by its config"),
            ("deeper", {"num_hidden_layers": 3}, "it lacks"),
        ):
            config = json.loads((folder / name / "config.json").read_text())
            (folder / name / "config.json").write_text(json.dumps({**config, **size}))
            wrong.append(({"model": name}, words))
        if kind == "transformers-image":  # the library would draw the classifier at random, and only log that it did
            saved(folder / "headless", image_network("vit")[0])
            wrong.append(({"model": "headless"}, "is not a complete image classifier: it was saved as ViTModel"))
        case = Case({"kind": kind, "model": "m"}, images(), b"no image", labels=labels, refused=wrong, **more)
        case.same, case.different = {"device": "cpu"}, {"dtype": "bfloat16", "revision": "v2"}
        case.broken = broken
        return case

    return made


def zero_shot(folder: Path, stack: ExitStack) -> Case:
    broken = save(folder, *image_network("siglip", len(tokenizer())), tokenizer())
    saved(folder / "vit", image_network("classifier")[0])
    wrong = [NO_FOLDER, NO_HUB, ONE_LABEL, ({"prompt": "{{ text }}"}, "no 'text', only label, description")]
    wrong += [({"prompt": "a photo"}, "two labels have one text"), ({"model": "vit"}, "cannot be loaded")]
    settings = {"kind": "transformers-zero-shot", "model": "m", "labels": LABELS}
    case = Case(settings, images(), b"no image", labels=tuple(LABELS), refused=wrong, broken=broken)
    case.same, case.different = {"device": "cpu"}, {"labels": ["billing", "bug", "else"], "prompt": "one {{ label }}"}
    return case


def classifier(folder: Path, stack: ExitStack) -> Case:
    def network(**config: Any) -> Any:
        return text_classifier("bert", len(tokenizer()), initializer_range=0.3, **config)

    broken = save(folder, network(id2label={0: "calm", 1: "angry", 2: "glad"}), tokenizer())
    saved(folder / "one", network(num_labels=1))
    saved(folder / "many", network(problem_type="multi_label_classification"))
    saved(folder / "headless", network().bert)
    wrong = [NO_FOLDER, NO_HUB, ({"text": []}, "text")]
    wrong += [({"model": name}, "does not choose one of several classes") for name in ("one", "many")]
    wrong += [({"model": "headless"}, "is not a complete text classifier: it was saved as BertModel")]
    settings = {"kind": "transformers-classifier", "model": "m"}
    case = Case(settings, texts(), labels=("calm", "angry", "glad"), refused=wrong, broken=broken)
    case.same = {"device": "cpu", "batch_tokens": 10, "text": "text"}
    case.different = {"max_tokens": 4, "text": ["text", "text"]}
    return case


def language(kind: str, **more: Any) -> Callable[[Path, ExitStack], Case]:
    """Return what makes a case of a language model that runs here."""

    def made(folder: Path, stack: ExitStack) -> Case:
        tiny = tiny_language_model(folder / "m")
        broken = save(folder, tiny.network, tiny.tokenizer)
        wrong = [ONE_LABEL, NO_COLUMN, NO_FOLDER, NO_HUB]
        if kind == "transformers-choice":
            wrong.append(({"gguf_file": "absent.gguf"}, "cannot be loaded"))
        settings = {"kind": kind, "model": "m", **ASKED}
        case = Case(settings, texts(), labels=tuple(LABELS), refused=wrong, broken=broken, **more)
        case.different = {**ASKED_OTHERWISE, "options": "text", "max_tokens": 99}
        return case

    return made


def vllm(folder: Path, stack: ExitStack) -> Case:
    fake_vllm.install(stack.enter_context(pytest.MonkeyPatch.context()))
    same = {"device": "cpu", "engine": {"gpu_memory_utilization": 0.5}}
    return language("vllm", logit_kind="log-probabilities", same=same)(folder, stack)


def odds(text: str) -> dict[str, float]:
    """Return what a server's model thinks of each label."""
    weights = np.random.default_rng(list(text.encode())).random(3) + 0.1
    return dict(zip(LABELS, (weights / weights.sum()).tolist(), strict=True))


def served(
    kind: str, answer: Callable[[dict[str, float]], Any], logit_kind: str, *refused: tuple[dict[str, Any], str]
) -> Callable[[Path, ExitStack], Case]:
    """Return what makes a case of a language model behind a server."""

    def made(folder: Path, stack: ExitStack) -> Case:
        server = stack.enter_context(scripted_server(lambda prompt, before: answer(odds(prompt))))
        nan = dict.fromkeys(LABELS, math.nan)
        broken = stack.enter_context(scripted_server(lambda prompt, before: answer(nan)))
        settings = {"kind": kind, "model": "m", "base_url": server.url, **ASKED, "prices": {"input": 1, "output": 2}}
        wrong = [ONE_LABEL, NO_COLUMN, *refused, ({"prices": {"input": 1}}, "prices.output")]
        wrong += [({"base_url": url}, "base_url") for url in ("http://user:password@host/v1", "host:8000")]
        wrong += [({"api_key": "sk-0123"}, "api_key"), ({"prices": None, "max_usd": 1}, "max_usd needs prices")]
        case = Case(settings, texts(), None, logit_kind, tuple(LABELS), bills=True, refused=wrong)
        case.same = {"prices": {"input": 3, "output": 3}, "api_key_env": "K", "max_concurrency": 1}
        case.same |= {"timeout_s": 9, "max_retries": 1, "max_usd": 1, "headers": {"x-team": "a"}}
        case.different = {**ASKED_OTHERWISE, "base_url": "http://host", "system": "Be brief.", "extra_body": {"a": 1}}
        if kind == "decisions":
            case.different |= {"instructions": "Choose the wrong one.", "question": "score"}
        case.broken = {"base_url": broken.url}
        return case

    return made


def completion(odds: dict[str, float]) -> Any:
    return chat_answer(dict(zip("ABC", odds.values(), strict=True)))


def decision(odds: dict[str, float]) -> Any:
    listed = [{"value": name, "probability": p} for name, p in odds.items()]
    usage = {"input_tokens": 30, "output_tokens": 1, "total_tokens": 31}
    return {"answers": [{"type": "choice", "probabilities": listed}], "usage": usage}


def remote(folder: Path, stack: ExitStack) -> Case:
    server = stack.enter_context(strict_server())
    nan = stack.enter_context(strict_server(answers=lambda *rows: logits_of(*rows) * np.float16("nan")))
    inputs = {"numbers": "INPUT__0", "title": "TITLE"}
    ways = {"timeout_s": 3, "retries": 1, "compress": True, "token_env": "T", "max_rows": 7, "max_concurrency": 1}
    wrong = [
        ({"url": "http://user:word@host"}, "url"),
        ({"ca": "ca.pem"}, "need a url with https"),
        ({"url": "https://h", "cert": "c.pem"}, "belong together"),
        ({"inputs": {"a": "x", "b": "x"}}, "same tensor"),
        ({"token_env": "ABSENT_TOKEN"}, "the environment variable ABSENT_TOKEN has no token"),
        ({"url": "http://h", "token_env": "T"}, "https"),
        ({"url": "http://10.0.0.1:8000", "headers": {"x-api-key": "$T"}}, "https"),
        ({"url": "http://127.0.0.1.example", "token_env": "T"}, "https"),
        ({"headers": {"Authorization": "Bearer abc"}}, "environment variable"),
        *(({"headers": headers}, "cannot be sent") for headers in ({"a b": "c"}, {"a": "c\r\nb: d"})),
    ]
    settings = {"kind": "remote", "url": server.url, "model": "net", "inputs": inputs, "output": "OUTPUT__0"}
    rows = {"numbers": column(np.arange(12.0).reshape(6, 2) / 8), "title": column(f"né {row}" for row in range(6))}
    case = Case(settings, rows, same=ways, refused=wrong, broken={"url": nan.url})
    case.different = {"output": "y", "url": "http://h", "inputs": {}, "model": "nett"}
    return case


def sentence_encoder(folder: Path, stack: ExitStack) -> Case:
    settings = {"kind": "sentence-encoder", "model": "m", "columns": ["text"], "required": ["text"]}
    case = Case(settings, texts(), logit_kind=EMBEDDING, same={"device": "cpu"}, refused=[NO_FOLDER])
    case.different = {"columns": ["title", "text"], "required": []}
    return case


KINDS = {
    "python": python,
    "saved": saved_logits,
    "onnx": onnx,
    "sklearn": sklearn,
    "torchvision": torchvision,
    "transformers-image": image_kind("transformers-image", "classifier", ("cat", "dog", "car")),
    "vision-encoder": image_kind("vision-encoder", "vit", logit_kind=EMBEDDING),
    "transformers-zero-shot": zero_shot,
    "transformers-classifier": classifier,
    "transformers-choice": language("transformers-choice", same={"device": "cpu", "batch_tokens": 50}),
    "vllm": vllm,
    "openai": served(
        "openai",
        completion,
        "log-probabilities",
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"endpoint": "responses"}, "endpoint"),
        ({"base_url": None, "options": "text"}, "needs a server that scores given tokens"),
        ({"base_url": None, "api_key_env": "ABSENT_KEY"}, "the environment variable ABSENT_KEY has no token"),
        ({"extra_body": {"logprobs": False}}, "set by other settings"),
        ({"extra_body": {"max_tokens": 9}}, "max_tokens is for votes"),
        ({"endpoint": "completions", "system": "Be brief."}, "system is for endpoint: chat"),
        ({"votes": 3, "top_logprobs": 5}, "top_logprobs"),
        ({"votes": 3, "options": "text"}, "letter or name"),
        ({"image": True, "options": "name"}, "use letter, or votes"),
    ),
    "decisions": served(
        "decisions",
        decision,
        "probabilities",
        ({"question": "predicate"}, "two labels"),
        ({"options": "letter"}, "a decision lists its own"),
        ({"labels": [f"label {n}" for n in range(256)]}, "255 labels, not 256"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"format": "systemone", "system": "Be fair."}, "systemone"),
    ),
    "remote": remote,
    "sentence-encoder": sentence_encoder,
}


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """A model of a kind, loaded from a spec that has travelled to another process."""
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if request.param == "sentence-encoder":
            (folder / "m").symlink_to(request.getfixturevalue("minilm"))
        made = KINDS[request.param](folder, stack)
        made.folder = folder
        made.model = pickle.loads(pickle.dumps(made.stage())).load()
        yield made


def vectors(answers):
    """Return each row's logits, None where the row failed."""
    lengths = [answers.logits.shape[1]] * len(answers.logits) if answers.n_options is None else answers.n_options
    return [None if row in answers.failures else answers.logits[row, :n] for row, n in enumerate(lengths)]


def test_the_suite_has_a_case_of_every_kind():
    without_a_model = {"human", "abstain"}  # execution/test_answers.py
    assert {*KINDS} | without_a_model == {*built_in_specs()}


def test_logits_are_float32_and_depend_on_no_neighbour_order_or_batch_cut(case):
    answers = case.model(case.batch())
    assert answers.logits.dtype == np.float32
    assert not answers.failures
    together = np.array(vectors(answers))
    assert together.shape == (6, len(case.labels) if case.labels else together.shape[1])
    assert np.isfinite(together).all()
    assert len(np.unique(together, axis=0)) == 6
    cuts = [[0], [1, 2], [5, 4, 3]]
    for rows in ([5, 4, 3, 2, 1, 0], *cuts):
        part = np.array(vectors(case.model(case.batch(rows))))
        assert np.abs(part - together[rows]).max() <= ROUNDING * together.std()


@pytest.mark.parametrize("case", [kind for kind in KINDS if kind != "python"], indirect=True)
def test_a_row_that_cannot_be_read_fails_alone(case):
    together = vectors(case.model(case.batch()))
    batch = {name: values.copy() for name, values in case.batch().items()}
    batch[next(iter(batch))][2] = case.unreadable
    answers = case.model(batch)
    assert answers.failures.keys() == {2}
    assert "\n" not in answers.failures[2]
    assert "prices" not in case.settings or answers.costs[2] == 0  # nothing was asked
    for row in (0, 1, 3, 4, 5):
        assert vectors(answers)[row] == pytest.approx(together[row], abs=ROUNDING * float(np.std(together)))
    nothing = case.model({name: values[[2, 2]] for name, values in batch.items()})
    assert nothing.failures.keys() == {0, 1}
    assert len(nothing.logits) == 2


def test_a_batch_without_the_column_is_refused_by_its_name(case):
    missing = next(iter(case.columns))
    with pytest.raises((DataError, KeyError), match=missing):
        case.model({"elsewhere": np.zeros(2)})


@pytest.mark.parametrize("case", [kind for kind in KINDS if kind not in ("saved", "sentence-encoder")], indirect=True)
def test_answers_that_are_nan_are_failed_rows_or_an_error_and_never_logits(case):
    model = case.stage(**case.broken).load()
    assert model(case.batch()).failures.keys() == set(range(6))


def test_the_kind_of_logits_their_labels_and_costs_are_as_declared(case):
    stage = case.stage()
    assert stage.model.answers_kind == case.logit_kind
    if case.logit_kind != EMBEDDING:
        assert (kind_of(case.model.facts.logit_kind) or "raw") == case.logit_kind
    assert case.model.facts.labels == case.labels
    assert stage.model.label_names in (None, case.labels)
    assert stage.model.columns_read.names in (None, case.columns.keys() - {"example_id"})
    answers = case.model(case.batch())
    assert (answers.costs is not None) == (stage.model.cost_unit is not None) == case.bills
    if case.bills:
        assert (answers.costs > 0).all()
        alone = [case.model(case.batch([row])).costs[0] for row in range(6)]
        assert answers.costs == pytest.approx(alone)


def test_the_identity_changes_with_what_changes_answers_and_with_nothing_else(case):
    stage = case.stage()
    assert pickle.loads(pickle.dumps(stage)) == stage
    identity = stage.model.identity
    for name, value in case.same.items():
        assert case.stage(**{name: value}).model.identity == identity, name
    identities = {case.stage(**{name: value}).model.identity for name, value in case.different.items()}
    assert len(identities | {identity}) == 1 + len(case.different)
    if stage.model.shown is not None:
        asked = case.different.keys() & SHOWN
        prompts = {case.stage(**{name: case.different[name]}).model.shown for name in asked}
        assert len(prompts | {stage.model.shown}) == 1 + len(asked)


@pytest.mark.parametrize("case", ["onnx", "sklearn", "torchvision", "transformers-image", "vllm"], indirect=True)
def test_the_identity_is_that_of_the_files_content_wherever_they_lie(case, tmp_path):
    shutil.copytree(case.folder, tmp_path / "moved")
    moved = replace(case, folder=tmp_path / "moved")
    assert moved.stage().model.identity == case.stage().model.identity
    path = moved.folder / next(case.settings[key] for key in ("model", "path", "weights") if key in case.settings)
    largest = max((file for file in (path, *path.rglob("*")) if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)
    assert moved.stage().model.identity != case.stage().model.identity


@pytest.mark.parametrize("case", ["transformers-classifier", "transformers-choice"], indirect=True)
def test_a_model_spread_over_the_devices_there_are_answers_alike(case, monkeypatch):
    """By accelerate's device map, which has the CPU alone on a machine without a GPU."""
    spread = case.stage().model.load(Placement(num_gpus=2))(case.batch())
    assert np.array_equal(vectors(spread), vectors(case.model(case.batch())))
    monkeypatch.setattr("cauc_ray.errors.find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(ConfigError, match="needs accelerate; install with: pip install"):
        case.stage().model.load(Placement(num_gpus=2))


def test_wrong_settings_are_refused_in_one_line_that_names_them(case):
    setting = next(iter(case.same))
    for changes, words in [*case.refused, ({f"{setting}s": 1}, f"did you mean '{setting}'")]:
        with pytest.raises(CaucError) as error:
            case.stage(**changes).load()
        assert words in str(error.value)
        assert "\n" not in str(error.value)
