"""Attention: one meaning (masks.py, reference.py), several ways to compute it, chosen by the placement (attend.py)."""
