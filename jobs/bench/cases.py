"""Models of each kind as a pool file has them, and by hand."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Floats
from jobs.bench.checkpoints import (
    SIDE,
    clip_folder,
    network_folder,
    network_model,
    onnx_file,
    random_pictures,
    random_texts,
)
from jobs.bench.part import LeftOut
from jobs.bench.processes import listening

LETTERS = "ABCD"
LABELS = ("bill", "fault", "praise", "other")
OPTIONS = "Options:\n" + "".join(f"{letter}. {label}\n" for letter, label in zip(LETTERS, LABELS, strict=True)) + "\n"
# Labelled rows that precede every question.
EXAMPLES = [{"text": text, "label": label} for text, label in zip(random_texts(8, seed=0), 2 * LABELS, strict=True)]
CONCURRENCY = 32

# A model by hand: returns the logits of rows, (n, K).
Bare: TypeAlias = Callable[[Batch], Floats]


@dataclass(frozen=True, slots=True)
class Case:
    """A model of a kind.

    Attributes:
        model: As a pool file has it.
        bare: The same by hand.
        column: The column that it reads.
        rows: Returns rows of that column by number and seed.
    """

    model: Mapping[str, Any]
    bare: Bare
    column: str
    rows: Callable[[int, int], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes cases; its methods are named after the kinds.

    Attributes:
        folder: An empty folder.
        device: cpu or cuda.
        batch: Rows of a batch.
        resources: Resources that end with the case.
    """

    folder: Path
    device: str
    batch: int
    resources: ExitStack

    @property
    def on_gpu(self) -> bool:
        """Return whether the models compute on a GPU."""
        return self.device == "cuda"

    def torchvision(self, arch: str | None = None) -> Case:
        """Return a network of TorchVision."""
        import torch
        from torchvision.models import get_model, get_model_weights

        arch = arch or ("vit_l_16" if self.on_gpu else "resnet18")
        model = network_model(arch, self.folder, device=self.device)
        network = get_model(arch, weights=None).eval()
        network.load_state_dict(torch.load(model["weights"], weights_only=True))
        preprocess = get_model_weights(arch).DEFAULT.transforms()
        return Case(model, partial(self._seen, preprocess, network.to(self.device)), "image", random_pictures)

    def transformers_image(self) -> Case:
        """Return a vision transformer of Transformers."""
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        folder = self._saved("ViTForImageClassification", "ViTImageProcessor", 192, 1024, num_labels=100)
        processor = AutoImageProcessor.from_pretrained(folder)
        network = AutoModelForImageClassification.from_pretrained(folder, dtype="float32").eval()
        preprocess = partial(_pixels, processor)
        model = {"kind": "transformers-image", "model": str(folder), "device": self.device}
        return Case(model, partial(self._seen, preprocess, network.to(self.device)), "image", random_pictures)

    def transformers_zero_shot(self) -> Case:
        """Return a CLIP, which compares images with the labels; by hand, too, these are embedded once."""
        import torch
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        folder = clip_folder(self.folder / "clip", LABELS, **self._sizes(192, 1024))
        network, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        with torch.inference_mode():
            tokens = tokenizer([*LABELS], padding=True, return_tensors="pt")
            texts = network.get_text_features(**tokens).pooler_output
            texts = (network.logit_scale.exp() * texts / texts.norm(dim=-1, keepdim=True)).to(self.device)

        def forward(pixels: Any) -> Any:
            images = network.get_image_features(pixel_values=pixels).pooler_output
            return images @ texts.T / images.norm(dim=-1, keepdim=True)

        preprocess = partial(_pixels, AutoImageProcessor.from_pretrained(folder))
        settings = {"labels": LABELS, "prompt": "{{ label }}", "device": self.device}
        model = {"kind": "transformers-zero-shot", "model": str(folder), **settings}
        network.to(self.device)
        return Case(model, partial(self._seen, preprocess, forward), "image", random_pictures)

    def onnx(self) -> Case:
        """Return a network in an ONNX file."""
        import onnxruntime

        path, provider = onnx_file("resnet18", self.folder), f"{'CUDA' if self.on_gpu else 'CPU'}ExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            raise LeftOut("this onnxruntime has no GPU")
        options, threads = onnxruntime.SessionOptions(), int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        options.intra_op_num_threads = threads  # as the stage
        session = onnxruntime.InferenceSession(path, options, providers=[provider])
        pool = self.resources.enter_context(ThreadPoolExecutor(threads))

        def bare(columns: Batch) -> Floats:
            batches = [[pool.submit(_cut_out, image) for image in rows] for rows in self._batches(columns["image"])]
            pixels = (np.stack([image.result() for image in batch]) for batch in batches)
            return np.concatenate([session.run(["logits"], {"pixels": batch})[0] for batch in pixels])

        model = {"kind": "onnx", "model": str(path), "image": {"size": SIDE}, "device": self.device}
        return Case(model, bare, "image", random_pictures)

    def transformers_classifier(self) -> Case:
        """Return a classifier of texts."""
        folder = self._saved("BertForSequenceClassification", (), 384, 1024, num_labels=4)
        bare = self._padded(
            folder, "AutoModelForSequenceClassification", lambda network, tokens: network(**tokens).logits
        )
        model = {"kind": "transformers-classifier", "model": str(folder), "device": self.device}
        return Case(model, lambda columns: bare([*columns["text"]]), "text", random_texts)

    def transformers_choice(self, examples: Sequence[Mapping[str, str]] = ()) -> Case:
        """Return a language model that chooses a letter."""
        folder = self.language_model()
        letters = _letter_tokens(folder)

        def forward(network: Any, tokens: Any) -> Any:
            return network(**tokens, logits_to_keep=1, use_cache=False).logits[:, -1, letters]

        bare = self._padded(folder, "AutoModelForCausalLM", forward)
        model = language(folder, kind="transformers-choice", device=self.device, examples=examples)
        return Case(model, lambda columns: bare(prompts(columns, examples)), "text", random_texts)

    def shared_prefix(self) -> Case:
        """Return the same whose prompts all begin with some examples."""
        return self.transformers_choice(EXAMPLES)

    def vllm(self) -> Case:
        """Return a language model in a vLLM engine."""
        if find_spec("vllm") is None:
            raise LeftOut("vllm is not installed")
        from vllm import LLM, SamplingParams

        folder = self.language_model()
        settings = {"max_model_len": 1024, "gpu_memory_utilization": 0.3}
        engine = LLM(str(folder), dtype="auto" if self.on_gpu else "float32", enable_prefix_caching=True, **settings)
        letters = _letter_tokens(folder)
        sampling = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=letters, detokenize=False)

        def bare(columns: Batch) -> Floats:
            outputs = engine.generate(prompts(columns), sampling, use_tqdm=False)
            logprobs = [output.outputs[0].logprobs[0] for output in outputs]
            return np.array([[of_row[token].logprob for token in letters] for of_row in logprobs])

        return Case(language(folder, kind="vllm", engine=settings), bare, "text", random_texts)

    def openai(self) -> Case:
        """Return a slow server of chat completions."""
        settings: Any = {"model": "m", "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}

        async def ask(client: Any, text: str) -> dict[str, float]:
            prompt = f"{OPTIONS}Text: {text}\nAnswer with the letter of the right option only."
            turns = [{"role": "user", "content": prompt}]
            answer = await client.chat.completions.create(messages=turns, **settings)
            return {one.token: one.logprob for one in answer.choices[0].logprobs.content[0].top_logprobs}

        return self._served("openai", ask, LETTERS)

    def decisions(self) -> Case:
        """Return a slow server of decisions."""
        question = {"type": "choice", "instructions": "Choose the right option."}
        settings: Any = {"model": "m", "questions": [{**question, "choices": [{"value": label} for label in LABELS]}]}

        async def ask(client: Any, text: str) -> dict[str, float]:
            answer = await client.decisions.create(input=f"Text: {text}", **settings)
            return {one.value: one.probability for one in answer.answers[0].probabilities}

        return self._served("decisions", ask, LABELS)

    def python(self) -> Case:
        """Return a callable of a user's."""
        function = perceptron(self.device)

        def bare(columns: Batch) -> Floats:
            return np.concatenate([function({"x": rows}) for rows in self._batches(columns["x"])])

        model = {"kind": "python", "factory": "jobs.bench.cases:perceptron", "kwargs": {"device": self.device}}
        return Case(model, bare, "x", lambda n, seed: np.random.default_rng(seed).standard_normal((n, 512), np.float32))

    def _served(
        self, kind: str, ask: Callable[[Any, str], Awaitable[dict[str, float]]], options: Iterable[str]
    ) -> Case:
        """Return a kind that asks a server, next to openai's client with as many requests at a time.

        Args:
            kind: The kind.
            ask: Returns the number of each option by its name, for a text.
            options: The names of the options.
        """
        from openai import AsyncOpenAI

        url = self.resources.enter_context(listening([sys.executable, "-m", "jobs.bench.completions"]))
        loop, client = asyncio.new_event_loop(), AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        self.resources.callback(loop.close)
        self.resources.callback(lambda: loop.run_until_complete(client.close()))

        async def answer(gate: asyncio.Semaphore, text: str) -> list[float]:
            async with gate:
                numbers = await ask(client, text)
            return [numbers[option] for option in options]

        async def ask_all(texts: Iterable[str]) -> list[list[float]]:
            gate = asyncio.Semaphore(CONCURRENCY)
            return await asyncio.gather(*(answer(gate, text) for text in texts))

        def bare(columns: Batch) -> Floats:
            return np.array(loop.run_until_complete(ask_all(columns["text"])))

        model = language("m", kind=kind, base_url=f"{url}/v1", max_concurrency=CONCURRENCY)
        return Case(model, bare, "text", random_texts)

    def language_model(self, cpu: int = 384, gpu: int = 1536) -> Path:
        """Save a Llama with random weights, whose hidden size depends on the device."""
        texts = prompts({"text": np.array([""], object)}, EXAMPLES)
        return self._saved("LlamaForCausalLM", texts, cpu, gpu, max_position_embeddings=2048)

    def _saved(self, kind: str, reads: str | Sequence[str], cpu: int, gpu: int, **sizes: Any) -> Path:
        return network_folder(kind, self.folder, reads, **sizes, **self._sizes(cpu, gpu))

    def _sizes(self, cpu: int, gpu: int) -> dict[str, int]:
        """Return sizes of a network that make a row enough work for the device, from its hidden size there."""
        if self.on_gpu:
            return {"hidden_size": gpu, "num_hidden_layers": 24, "num_attention_heads": 16}
        return {"hidden_size": cpu}

    def _batches(self, rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        return [rows[start : start + self.batch] for start in range(0, len(rows), self.batch)]

    def _seen(self, preprocess: Callable[[Any], Any], network: Callable[[Any], Any], columns: Batch) -> Floats:
        """Answer images behind a DataLoader; for a GPU it has a process for each core, and the network is autocast."""
        import torch
        from torch.utils.data import DataLoader

        of_cores: dict[str, Any] = {"num_workers": os.cpu_count(), "pin_memory": True} if self.on_gpu else {}
        batches = []
        with torch.inference_mode(), torch.autocast(self.device, torch.bfloat16, enabled=self.on_gpu):
            for pixels in DataLoader(_Pictures(columns["image"], preprocess), self.batch, **of_cores):
                output = network(pixels.to(self.device, non_blocking=True))
                batches.append(getattr(output, "logits", output).float())
            logits: Floats = torch.cat(batches).cpu().numpy()
        return logits

    def _padded(self, folder: Path, factory: str, forward: Callable[[Any, Any], Any]) -> Callable[[list[str]], Floats]:
        """Return what answers texts by plain passes, a batch each, sorted by length and padded on the left."""
        import torch
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, padding_side="left" if "Causal" in factory else "right"
        )
        precision = torch.bfloat16 if self.on_gpu else torch.float32
        network = getattr(transformers, factory).from_pretrained(folder, dtype=precision).eval().to(self.device)

        def answer(texts: list[str]) -> Floats:
            encoded = tokenizer(texts)
            order = np.argsort([len(tokens) for tokens in encoded["input_ids"]])
            batches = []
            with torch.inference_mode():
                for rows in self._batches(order):
                    batch = {key: [values[row] for row in rows] for key, values in encoded.items()}
                    padded = tokenizer.pad(batch, return_tensors="pt").to(self.device)
                    batches.append(forward(network, padded).float())
                logits: Floats = torch.cat(batches).cpu().numpy()
            return logits[np.argsort(order)]

        return answer


def perceptron(device: str) -> Bare:
    """Return what answers numbers by three wide layers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(512, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 10)]
    network = nn.Sequential(*layers).to(device)

    def answer(columns: Batch) -> Floats:
        with torch.inference_mode():
            logits: Floats = network(torch.from_numpy(columns["x"]).to(device)).cpu().numpy()
        return logits

    return answer


def language(model: str | Path, **settings: Any) -> dict[str, Any]:
    """Return a language model of a pool file that chooses one of the labels."""
    return {"model": str(model), "prompt": "Text: {{ text }}", "labels": LABELS, **settings}


def prompts(columns: Batch, examples: Sequence[Mapping[str, str]] = ()) -> list[str]:
    """Return the prompts of texts as a stage writes them."""
    answered = [f"Text: {one['text']}\nAnswer: {LETTERS[LABELS.index(one['label'])]}\n\n" for one in examples]
    head = "".join([OPTIONS, *answered])
    return [f"{head}Text: {text}\nAnswer:" for text in columns["text"]]


def _letter_tokens(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.encode(f" {letter}")[-1] for letter in LETTERS]


class _Pictures:
    """A data set of encoded images."""

    def __init__(self, encoded: npt.NDArray[Any], preprocess: Callable[[Any], Any]) -> None:
        self._encoded, self._preprocess = encoded, preprocess

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, row: int) -> Any:
        return self._preprocess(_opened(self._encoded[row]))


def _opened(encoded: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(encoded)).convert("RGB")


def _pixels(processor: Any, picture: Any) -> Any:
    return processor(picture, return_tensors="pt")["pixel_values"][0]


def _cut_out(encoded: bytes) -> Floats:
    """Return an image of 400 x 300 as ImageNet's networks read it: float32 (3, 224, 224)."""
    cut = _opened(encoded).resize((341, 256)).crop((58, 16, 58 + SIDE, 16 + SIDE))
    mean, deviation = (np.array(of, np.float32) for of in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    pixels: Floats = ((np.asarray(cut, np.float32) / 255 - mean) / deviation).transpose(2, 0, 1)
    return pixels
