"""Measurements of cauc-ray against what a user would otherwise run, and against what the machine allows."""
