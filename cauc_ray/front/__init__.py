"""The cauc command, reports and the demo."""
