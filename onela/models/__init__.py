"""Model families: modules under the checkpoints' names, and loading them."""

from onela.models.causal_lm import CausalLM
from onela.models.config import ModelConfig
from onela.models.registry import FAMILIES, load_model, read_model_config
from onela.models.rounding import LEAST, Rounding

__all__ = ["FAMILIES", "LEAST", "CausalLM", "ModelConfig", "Rounding", "load_model", "read_model_config"]
