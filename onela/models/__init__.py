"""Model families: modules under the checkpoints' names, and loading them."""

from onela.models.causal_lm import CausalLM
from onela.models.config import ModelConfig
from onela.models.registry import FAMILIES, load_model

__all__ = ["FAMILIES", "CausalLM", "ModelConfig", "load_model"]
