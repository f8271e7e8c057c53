"""Models on disk: safetensors with Hugging Face's names, one file or sharded, and the built-in initial model."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from services.jobfile import ConfigError, JobFile
from services.models.config import ModelConfig
from services.models.decoder import Decoder

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SHARD_BYTES: Final = 32 << 20
"""A shard is refetched whole when it is torn; and while one waits for the disk, the next ones are written and hashed."""
_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TINY: Final = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}


WRITERS: Final = min(8, 2 * (os.cpu_count() or 1))
"""Shards written at once: writing and hashing release the interpreter, and half of the writers wait for the disk."""
PIECE_BYTES: Final = 1 << 20
"""Handed to a sink at once: what fits into a core's cache."""


class Sink(Protocol):
    """A file being written."""

    def write(self, data: Any, /) -> Any:  # Any: whatever has a buffer
        """The next bytes of it."""
        ...


Opener = Callable[[Path], contextlib.AbstractContextManager[Sink]]
"""Opens a file that takes its place when the context ends without an error."""


@contextlib.contextmanager
def replacing(file: Path) -> Generator[Sink]:
    """A new file that replaces `file` at the end.

    Not in place: tensors that are written may be maps of the very file, and cutting it short would end the process.
    """
    part = file.with_name(f".{file.name}.part")
    with part.open("wb", buffering=0) as opened:
        yield opened
    part.replace(file)


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a model folder, in name order. Raises ConfigError where one is missing."""
    base = Path(directory)
    if (base / INDEX).is_file():
        try:
            index = msgspec.json.decode((base / INDEX).read_bytes(), type=dict[str, Any])
            names = sorted(set(msgspec.convert(index.get("weight_map"), dict[str, str]).values()))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{base / INDEX}: not an index of safetensors shards: {error}") from error
        files = [base / name for name in names]
    else:
        files = [base / SINGLE]
    for file in files:
        if not os.path.isfile(file):  # noqa: PTH113 - a name too long for the system is no file; Path.is_file raises
            raise ConfigError(f"{file}: missing; a model folder needs {SINGLE}, or {INDEX} and the shards it names")
    return files


def check_weights(directory: str | Path) -> ModelConfig:
    """Whether a model folder is whole and fits its config.json, without reading its weights. Raises ConfigError."""
    config = ModelConfig.load(directory)
    found: dict[str, list[int]] = {}
    for file in weight_files(directory):
        try:
            with _opened(file) as opened:  # refuses a file that is shorter or longer than its header says
                found.update({name: list(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: not a complete safetensors file: {error}") from error
    with torch.device("meta"):
        wanted = dict(Decoder(config).named_parameters())
    _check_fit({name: list(parameter.shape) for name, parameter in wanted.items()}, found, str(directory))
    return config


def _check_fit(wanted: Mapping[str, list[int]], found: Mapping[str, list[int]], where: str) -> None:
    missing = sorted(wanted.keys() - found.keys())
    # A tied model may repeat its embedding as the head; everything else must have a place.
    surplus = sorted(found.keys() - wanted.keys() - {"lm_head.weight"})
    if missing or surplus:
        raise ConfigError(f"{where}: tensors do not fit config.json: missing {missing[:3]}, unknown {surplus[:3]}")
    for name, shape in wanted.items():
        if shape != found[name]:
            raise ConfigError(f"{where}: {name} has shape {found[name]}, config.json says {shape}")


def read_weights(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a model folder by name, on the CPU. Raises ConfigError."""
    return dict(_tensors(weight_files(directory)))


def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Copy a folder's tensors into `model`, in place, casting to its type and device.

    Names and shapes are checked before the first copy, so a ConfigError leaves the model as it was.
    """
    apply_weights(model, read_weights(directory), str(directory))


def apply_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: str = "weights") -> None:
    """Copy `tensors` into `model`, in place; all fit, or a ConfigError that mentions `where` and no change."""
    wanted = dict(model.named_parameters())
    shapes = {name: list(parameter.shape) for name, parameter in wanted.items()}
    _check_fit(shapes, {name: list(tensor.shape) for name, tensor in tensors.items()}, where)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])


def save_weights(
    model_state: Mapping[str, Tensor],
    directory: str | Path,
    shard_bytes: int = SHARD_BYTES,
    *,
    opener: Opener = replacing,
) -> list[Path]:
    """Write tensors as safetensors: one file, or shards of at most about `shard_bytes` with an index. Returns them all.

    Each weight file is written through `opener`, several at once in threads.
    """
    base = Path(directory)
    base.mkdir(parents=True, exist_ok=True)
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in sorted(model_state.items()):
        value = tensor.detach().to("cpu").contiguous()
        if groups[-1] and size + value.nbytes > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = value
        size += value.nbytes
    if len(groups) == 1:
        _write(groups[0], base / SINGLE, opener)
        return [base / SINGLE]
    files = [base / f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    with ThreadPoolExecutor(min(WRITERS, len(files)), thread_name_prefix="weights") as pool:
        for done in [pool.submit(_write, group, file, opener) for group, file in zip(groups, files, strict=True)]:
            done.result()
    weight_map = {name: file.name for file, group in zip(files, groups, strict=True) for name in group}
    total = sum(tensor.nbytes for group in groups for tensor in group.values())
    (base / INDEX).write_bytes(msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return [*files, base / INDEX]


def initial_model(job: JobFile, vocab_size: int | None = None) -> Path:
    """Folder of the model that training starts from: `model.path`, or the built-in one, made if need be.

    'builtin:tiny' is a Qwen3 of two layers and width 64 with random weights that follow from `job.seed` and the
    vocabulary alone, in `<run_dir>/models/initial`; `vocab_size` defaults to that of `environment.tokenizer`.
    Several processes may call it at once. Raises ConfigError.
    """
    if not job.model.path.startswith("builtin:"):
        ModelConfig.load(job.model.path)
        weight_files(job.model.path)
        return Path(job.model.path)
    if job.model.path != "builtin:tiny":
        raise ConfigError(f"model.path = {job.model.path!r}: the only built-in model is 'builtin:tiny'")
    target = job.run_dir / "models" / "initial"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".initial-", dir=target.parent))
    try:
        config = _tiny_config(vocab_size or _vocabulary(job))
        (draft / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
        save_weights(_random(ModelConfig.load(draft), job.job.seed), draft)
        # Another process may have won the race: rename fails onto its full folder, and its content is the same.
        with contextlib.suppress(OSError):
            os.rename(draft, target)  # noqa: PTH104 - Path.rename is the same call
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if not (target / "config.json").is_file():
        raise ConfigError(f"{target}: the initial model could not be written; is job.data_dir writable?")
    return target


def _write(tensors: Mapping[str, Tensor], file: Path, opener: Opener) -> None:
    """One safetensors file: the header's length, the header, each tensor's bytes. The library's writer takes 2-3 times as long."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with opener(file) as sink:
        _write_all(sink, len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            content: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # Any: numpy's stubs know no buffers
            _write_all(sink, content)


def _write_all(sink: Sink, content: Any) -> None:  # Any: whatever has a buffer
    """In pieces, so that a sink that hashes finds what it has just written in the processor's cache."""
    view = memoryview(content).cast("B")
    while view:
        written = sink.write(view[:PIECE_BYTES])
        view = view[written:]


def _opened(file: Path) -> Any:
    """The library's reader; `Any` because it has no stubs."""
    return safe_open(file, framework="pt")


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        try:
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: not a complete safetensors file: {error}") from error


def _vocabulary(job: JobFile) -> int:
    from services.environments.loading import load_tokenizer

    return load_tokenizer(job).vocab_size


def _tiny_config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        **TINY,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _random(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Weights with unit-scale activations and almost flat first predictions, so that exploration starts even."""
    generator = torch.Generator().manual_seed(seed)
    weights = Decoder(config).state_dict()
    for name, tensor in sorted(weights.items()):
        if tensor.dim() < 2:
            continue  # norms stay one
        std = tensor.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * config.num_hidden_layers) ** 0.5
        elif name.endswith("embed_tokens.weight"):
            std = 1.0
        elif name == "lm_head.weight":
            std = 0.02
        weights[name] = torch.randn(tensor.shape, generator=generator) * std
    return weights
