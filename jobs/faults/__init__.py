"""Faults put into runs of a cascade at random moments: what they cost, and that they change nothing."""
