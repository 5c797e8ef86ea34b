"""Layouts: logical axes to mesh axes, resolved to shardings, applied to activations, described as tables and pictures."""
