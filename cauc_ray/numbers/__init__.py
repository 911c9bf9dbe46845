"""Temperatures, confidences, metrics, costs and the exact threshold sweep: numpy alone.

Shapes are written with N rows (examples), K options and M stages. An option that a row does not have
is padded with -inf.
"""
