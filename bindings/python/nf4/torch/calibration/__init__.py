"""Calibrated 4-bit weights: scales and codes by what the layers of a model see in a text."""
