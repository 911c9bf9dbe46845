"""Temperatures, confidences, metrics, costs and the exact threshold sweep: numpy alone.

In shapes, N counts rows (examples), K options and M stages. Options that a row does not have are padded with -inf.
"""
