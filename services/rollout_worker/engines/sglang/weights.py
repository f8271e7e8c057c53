"""Whether a server holds the weights that it says it loaded.

SGLang's checksums (`/weights_checker`) are its own: of its fused tensors, of each rank's shard, by one function on CPUs and by another on
GPUs. So they are not computed here again, but held against the snapshots: from one version to the next exactly those tensors of the server
must have changed of which the snapshots' own bytes did. That is so whatever the function, and however tensors are split between GPUs.
Where the server stores another type than the snapshot has, a small change may be lost in rounding; then only a server in which nothing
changed is told apart. What has no counterpart by name is not judged.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import blake3
import msgspec

FUSED: Final = (
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
"""Hugging Face's names, and the tensor of SGLang's that holds them beside others. The first that fits."""
TYPES: Final = {"float32": "F32", "float": "F32", "bfloat16": "BF16", "float16": "F16", "half": "F16"}
"""SGLang's and Hugging Face's names of types, and those of safetensors."""
MOST_HEADER: Final = 100 << 20
"""Bytes; safetensors' own bound."""


class Source(msgspec.Struct, frozen=True):
    """A tensor of a snapshot: its type as safetensors names it, and a digest of its bytes."""

    dtype: str
    digest: str


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot's tensors, and the checksums of the server's after it was loaded: one of each rank that has the tensor."""

    sources: Mapping[str, Source]
    sums: Mapping[str, tuple[str, ...]]
    dtype: str = ""  # of safetensors' names, the type that the server stores; "": not known


class WeightFileError(Exception):
    """A file that is not safetensors, or is cut short."""


def sources(folder: str | Path) -> dict[str, Source]:
    """The tensors of all safetensors files there. Reads every byte. Raises WeightFileError, OSError."""
    found: dict[str, Source] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found.update(_tensors(file))
    return found


def _tensors(file: Path) -> dict[str, Source]:
    if file.stat().st_size < 8:
        raise WeightFileError(f"{file}: its header is not whole")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:8], "little")
        if length > min(MOST_HEADER, len(data) - 8):
            raise WeightFileError(f"{file}: its header is not whole")
        try:
            header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
        except msgspec.DecodeError as error:
            raise WeightFileError(f"{file}: {error}") from error
        found: dict[str, Source] = {}
        with memoryview(data) as view, view[8 + length :] as body:
            for name, described in header.items():
                if name == "__metadata__":
                    continue
                begin, end = described["data_offsets"]
                if not 0 <= begin <= end <= len(body):
                    raise WeightFileError(f"{file}: {name} is not whole")
                with body[begin:end] as part:
                    digest = blake3.blake3(part, max_threads=blake3.blake3.AUTO).hexdigest()
                found[name] = Source(described["dtype"], digest)
        return found


def stored_type(server: str, folder: str | Path) -> str:
    """The type, by safetensors' name, that a server with this `--dtype` stores; "" where that is not certain."""
    if server != "auto":
        return TYPES.get(server, "")
    try:
        described = msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return ""
    named = TYPES.get(str(described.get("dtype", described.get("torch_dtype"))), "")
    return "" if named == "F32" else named  # which "auto" makes a shorter one of


def sums_of(ranks: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """`ranks` of an answer of `/weights_checker`. Draft models are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for rank in ranks:
        for name, checksum in rank["checksums"].items():
            found[name] = (*found.get(name, ()), str(checksum))
    return found


def mismatch(before: Held, after: Held) -> str:
    """What speaks against the server's holding `after.sources`, "" if nothing does. Pure."""
    parts: dict[str, list[str]] = {}
    for source in sorted(before.sources.keys() | after.sources.keys()):
        parts.setdefault(_counterpart(source), []).append(source)
    any_changed, any_should = False, False
    for name in sorted(before.sums.keys() & after.sums.keys() & parts.keys()):
        changed = before.sums[name] != after.sums[name]
        should = [each for each in parts[name] if before.sources.get(each) != after.sources.get(each)]
        any_changed, any_should = any_changed or changed, any_should or bool(should)
        if changed and not should:
            return f"{name} has changed, which is the same in both snapshots"
        exact = all(after.sources[each].dtype == after.dtype for each in should if each in after.sources)
        if should and exact and not changed:
            return f"{name} is as it was, though the snapshot's {should[0]} has changed"
    if any_should and not any_changed:
        return "none of its tensors has changed, though the snapshot's have"
    return ""


def _counterpart(source: str) -> str:
    for pattern, fused in FUSED:
        name, count = pattern.subn(fused, source)
        if count:
            return name
    return source
