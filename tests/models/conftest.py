import pytest
from language_models import smollm2, tiny_language_model


@pytest.fixture(
    scope="session", params=["random weights", pytest.param("SmolLM2", marks=pytest.mark.soak("language-models"))]
)
def language_model(request, tmp_path_factory):
    """A causal language model in a folder of its own, with what the transformers library alone makes of it."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("language-model")
    return tiny_language_model(folder) if request.param == "random weights" else smollm2().dequantised().save(folder)
