import pytest
from language_models import tiny_language_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A causal language model with random weights in a folder, and what the transformers library alone makes of it."""
    pytest.importorskip("transformers")
    return tiny_language_model(tmp_path_factory.mktemp("language-model"))
