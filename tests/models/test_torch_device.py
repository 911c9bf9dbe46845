"""Device time of forward passes, by the clock of a GPU that does not exist."""

import copy

import numpy as np
import pytest
import torch
from batches import question_batch, refused

from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.image_networks import ImageModel
from cauc_ray.models.kind import TorchSpec
from cauc_ray.models.language import ChoiceModel
from cauc_ray.models.torch_device import choose_device
from cauc_ray.models.transformers import TransformersChoiceSpec


class Gpu:
    """A device whose clock goes on as a test has it; it does all work at once."""

    now_s = 0.0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at_s = self.gpu.now_s

    def synchronize(self):
        assert self.at_s is not None

    def elapsed_time(self, later):
        return 1000 * (later.at_s - self.at_s)


def image_model(network, dtype):
    def preprocess(image):
        return torch.from_numpy(image).permute(2, 0, 1).float()

    return ImageModel(TorchSpec(kind="test", device="cpu", dtype=dtype), network, preprocess, ModelFacts("test"))


@pytest.mark.parametrize("options", ["letter", "text"])
def test_every_forward_pass_of_a_language_model_counts_and_nothing_else(tiny_model, options):
    """The device's clock goes on by a second in each of the network's passes, and at no other time."""
    gpu, passes, network = Gpu(), [], copy.deepcopy(tiny_model.network)
    asked = {"options": options, "batch_tokens": 1}
    settings = TransformersChoiceSpec(kind="transformers-choice", model=str(tiny_model.folder), **asked)
    model = ChoiceModel(settings, tiny_model.tokenizer, network, gpu.event)

    def run(network, inputs):
        passes.append(1)
        gpu.now_s += 1.0

    network.register_forward_pre_hook(run)
    rows = question_batch(("Is it?", ["yes it is", "no"]), ("Which is more?", ["one", "a pair of them"]))
    for n_calls in (1, 2):  # each call anew
        device_s = model(rows).device_s
        assert len(passes) == n_calls * device_s
        assert device_s == (2 if options == "letter" else 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_logits_have_the_precision_that_is_recorded(monkeypatch, dtype):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # by which GPUs shorten the factors of products
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 4))
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    during = []
    network[0].register_forward_hook(lambda *_: during.append(torch.backends.cudnn.allow_tf32))
    answers = image_model(network, dtype=dtype)({"image": images})
    assert answers.device_s is None  # without a GPU
    assert set(during) == {dtype != "float32"}
    assert torch.backends.cudnn.allow_tf32  # the setting is the process's
    expected = network[-1](torch.from_numpy(images).permute(0, 3, 1, 2).float().mean(dim=(2, 3)))
    assert answers.logits == pytest.approx(expected.detach().numpy(), rel=1e-6)  # bfloat16 has steps of 1 in 128


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_a_device_that_is_not_there_is_refused(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert f"device {device}: no GPU is visible" in refused(lambda: choose_device(device))
