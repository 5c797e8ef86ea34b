"""The GPT-2 family: learned positions, LayerNorm, GELU, biases everywhere, one table for embedding and head."""

from models.gpt.config import GPTConfig as GPTConfig
from models.gpt.model import GPT as GPT
