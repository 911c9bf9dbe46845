"""Methods that fine-tune language models on the queries' texts."""
