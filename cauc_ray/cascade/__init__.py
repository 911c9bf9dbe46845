"""The runtime of a cascade, without Ray: the common base of runs and services."""
