"""CAUC Base, CAUC-RF and the methods beside them: fitted from logits, stepped through by replay and run."""
