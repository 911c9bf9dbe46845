"""Routers that fine-tune a language model on the texts of queries: `pip install 'cauc-ray[text-routers]'`."""
