"""Policies: fitted from logits, stepped through by replays, runs and services."""
