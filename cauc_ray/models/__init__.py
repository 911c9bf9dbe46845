"""Pool files, and the adapters that turn a model of any kind into a stage."""
