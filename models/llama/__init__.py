"""The Llama family: RMSNorm, RoPE, grouped kv heads, SwiGLU; also Mistral's window, Qwen's biases and qk-norm."""

from models.llama.config import LlamaConfig as LlamaConfig
from models.llama.model import Llama as Llama
