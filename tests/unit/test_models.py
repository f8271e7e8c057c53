"""The decoder computes what Hugging Face's does; files survive a round trip; wrong ones are refused by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from services.jobfile import ConfigError, JobFile, JobSection
from services.models import Decoder, ModelConfig, initial_model, load_weights, read_weights, save_weights

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def oracle(kind: str):
    # Here, not above: it takes seconds, of every runner of the tests that only looks what is in this file.
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    torch.set_num_threads(1)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False))
    if kind == "qwen3-tied":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))
    if kind == "llama3":
        return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3))
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "llama", "llama3"])
def test_logits_equal_hugging_face(kind: str, tmp_path: Path):
    theirs = oracle(kind).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases must matter too
    theirs.save_pretrained(tmp_path)
    ours = Decoder(ModelConfig.load(tmp_path))
    load_weights(ours, tmp_path)
    tokens = torch.randint(0, 97, (3, 200))
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = float((ours(tokens) - expected).abs().max())
    assert difference < 1e-5 * max(1.0, float(expected.abs().max()))


def test_right_padding_changes_nothing():
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=True,
        **SIZES,
    )
    model = Decoder(config)
    tokens = torch.randint(0, 97, (2, 12))
    padded = tokens.clone()
    padded[1, 5:] = -100
    with torch.no_grad():
        whole = model(tokens[1:, :5])
        part = model(padded, torch.tensor([12, 5]))
    assert torch.allclose(whole[0], part[1, :5], atol=1e-6)


def test_shards_round_trip(tmp_path: Path):
    state = {f"layer{index}": torch.randn(10, 10) for index in range(5)}
    files = save_weights(state, tmp_path, shard_bytes=900)
    assert len(files) == 4
    assert all(torch.equal(tensor, state[name]) for name, tensor in read_weights(tmp_path).items())
    files[1].unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors: missing"):
        read_weights(tmp_path)


def test_tiny_model_follows_from_the_seed(tmp_path: Path):
    def weights(folder: str, seed: int):
        return read_weights(initial_model(JobFile(job=JobSection(data_dir=str(tmp_path / folder), seed=seed)), 20))

    one, same, other = weights("a", 3), weights("b", 3), weights("c", 4)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    assert not list((tmp_path / "a" / "demo" / "models").glob(".initial*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "sliding"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_unsupported_is_refused_by_name(tmp_path: Path, change: dict[str, object], words: str):
    good = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, **SIZES}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(good | change))
    with pytest.raises(ConfigError, match=words):
        ModelConfig.load(tmp_path)


def test_missing_folder_says_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ModelConfig.load(tmp_path / "nowhere")


def test_a_misfit_leaves_the_model_alone(tmp_path: Path):
    directory = initial_model(JobFile(job=JobSection(data_dir=str(tmp_path))), 20)
    model = Decoder(ModelConfig.load(directory))
    before = model.model.norm.weight.clone()
    save_weights(read_weights(directory) | {"model.norm.weight": torch.zeros(3)}, directory)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape"):
        load_weights(model, directory)
    assert torch.equal(model.model.norm.weight, before)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
)
def test_files_are_what_the_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "b.matrix": torch.arange(15).reshape(3, 5).to(dtype),
        "a.odd": torch.ones(3).to(dtype),
        "c.scalar": torch.tensor(1).to(dtype),
        "d.none": torch.empty(0, 4).to(dtype),
        "e.turned": torch.arange(6).reshape(2, 3).t().to(dtype),
    }
    save_weights(tensors, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype and torch.equal(read[name], tensor)
