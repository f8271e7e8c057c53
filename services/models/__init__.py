"""The decoder that the embedded engine serves and the trainer trains: configuration, arithmetic, files."""

from services.models.config import ModelConfig
from services.models.decoder import Decoder
from services.models.files import initial_model, load_weights, read_weights, save_weights

__all__ = ["Decoder", "ModelConfig", "initial_model", "load_weights", "read_weights", "save_weights"]
