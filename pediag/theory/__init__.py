"""Closed forms of positional encodings in float64: frequencies, scalings, slopes, buckets, bounds, rounding.

Knows nothing of models and imports nothing of pediag but its errors: an independent reference.
"""
