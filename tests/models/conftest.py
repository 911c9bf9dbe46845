import pytest
from language_models import smollm2, tiny_language_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A causal language model with random weights in a folder, and what the transformers library alone makes of it."""
    pytest.importorskip("transformers")
    return tiny_language_model(tmp_path_factory.mktemp("language-model"))


@pytest.fixture(
    scope="session", params=["random weights", pytest.param("SmolLM2", marks=pytest.mark.soak("language-models"))]
)
def language_model(request, tiny_model, tmp_path_factory):
    """The tiny model, or a real one with the same."""
    return (
        tiny_model
        if request.param == "random weights"
        else smollm2().dequantised().save(tmp_path_factory.mktemp("smollm2"))
    )
