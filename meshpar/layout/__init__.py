"""Layouts: logical axes to mesh axes, resolved to shardings, applied to activations, shown as tables and pictures."""
