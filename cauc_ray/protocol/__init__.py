"""The Open Inference Protocol v2: tensors and messages, for the service and for clients of others."""
