"""Matrix products of activations with weights."""
