"""What a model is: read from Hugging Face's `config.json` of the Qwen3 and Llama families.

Pure but for reading the one file. Anything the decoder would compute wrongly is refused here, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from services.jobfile import ConfigError

ARCHITECTURES: Final = ("Qwen3ForCausalLM", "LlamaForCausalLM")


Size = Annotated[int, Meta(ge=1, le=10**9)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """RoPE frequencies stretched for longer contexts, as Llama 3.1 defines it."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Size


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of a decoder; field names are Hugging Face's."""

    architecture: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: Positive
    rope_theta: Positive
    max_position_embeddings: Size
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: Llama3Scaling | None = None
    dtype: str = "float32"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return self.architecture == "Qwen3ForCausalLM"

    @classmethod
    def load(cls, directory: str | Path) -> ModelConfig:
        """Read `<directory>/config.json`. Raises ConfigError."""
        path = Path(directory) / "config.json"
        try:
            raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); model.path must be a folder with config.json and "
                "safetensors files, or 'builtin:tiny'"
            ) from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: not a JSON object: {error}") from error
        return _convert(raw, path)


def _convert(raw: dict[str, Any], path: Path) -> ModelConfig:
    # Newer releases of transformers write `rope_parameters`, older ones `rope_theta` and `rope_scaling`.
    rope_value: object = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    try:
        names = msgspec.convert(raw.get("architectures") or [], list[Any])
        rope = msgspec.convert(rope_value, dict[str, Any])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: architectures, or rope parameters: {error}") from error
    architecture = str(names[0]) if names else "none"
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: architecture {architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{path}: hidden_act {activation!r} is not supported; only 'silu' is")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"{path}: use_sliding_window is not supported; use a model with full attention")
    heads, width = raw.get("num_attention_heads"), raw.get("hidden_size")
    derived = {
        "architecture": architecture,
        "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
        "rope_scaling": _scaling(rope, path),
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim")
        or (width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 0),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": raw.get("dtype") or raw.get("torch_dtype") or "float32",
    }
    try:
        config = msgspec.convert({**raw, **derived}, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if config.num_key_value_heads < 1 or config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{path}: num_attention_heads = {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads = {config.num_key_value_heads}"
        )
    return config


def _scaling(rope: dict[str, Any], path: Path) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope type {kind!r} is not supported; only 'default' and 'llama3' are")
    try:
        return msgspec.convert(rope, Llama3Scaling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: rope parameters: {error}") from error
