"""Logit tables, datasets and their splits, and the inputs of runs."""
