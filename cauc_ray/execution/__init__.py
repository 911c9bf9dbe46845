"""Cascades at work on Ray: stages as actors, a controller that sends on only what is deferred."""
