"""The runtime of a cascade, which knows nothing of Ray: runs and services stand on it."""
