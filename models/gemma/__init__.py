"""Gemma 2 and 3 (text): norms on both sides of each part, GeGLU, local and global layers in turn."""

from models.gemma.config import GemmaConfig as GemmaConfig
from models.gemma.model import Gemma as Gemma
