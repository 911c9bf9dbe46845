"""The paper's tables and figures, from saved logits."""
