"""Model families: modules under the checkpoints' names, and loading them."""

from onela.models.causal_lm import CausalLM
from onela.models.config import ModelConfig
from onela.models.registry import FAMILIES, load_model, read_model_config

__all__ = ["FAMILIES", "CausalLM", "ModelConfig", "load_model", "read_model_config"]
