"""Precision: which dtype each role of the step has, and which activations are kept for the backward."""
