"""Hugging Face weights in and out: safetensors, GGUF, and the map between their tensors and our parameters."""
