"""What a worker of some hardware and model needs for everything it does, as data with sources. Reads files; else pure.

A description is a JSON file: every number in it carries the source it comes from. Two are built in; the file of a user's own
hardware has the same form. `docs/make_hardware.py` makes the built-in ones from measured kernel times.
"""

from __future__ import annotations

import codecs
import math
from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from services.jobfile import ConfigError

BUILT_IN: Final = ("h800-qwen3-8b", "h800-qwen3-30b-a3b")
"""H800 GPUs, two a worker; sources and licences in `hardware/LICENSE.md`."""

Amount = Annotated[float, Meta(ge=0, le=1e18)]
Positive = Annotated[float, Meta(gt=0, le=1e18)]
Count = Annotated[int, Meta(ge=1, le=10**12)]


class HardwareError(ConfigError):
    """A description that cannot be used: file, key and reason."""


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constant and where it comes from."""

    value: Amount
    source: str


class Curve(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Seconds as a function of tokens (or rows): between two points on the line through them, beyond the last in proportion."""

    tokens: tuple[Positive, ...]
    seconds: tuple[Positive, ...]
    source: str

    def at(self, tokens: float) -> float:
        """Seconds for so many tokens; 0 for none."""
        if tokens <= 0:
            return 0.0
        xs, ys = self.tokens, self.seconds
        right = bisect_right(xs, tokens)
        if right == 0:
            return ys[0]
        if right == len(xs):
            return ys[-1] * tokens / xs[-1]
        x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


class Hardware(msgspec.Struct, frozen=True, dict=True, kw_only=True, forbid_unknown_fields=True):
    """One worker: a tensor-parallel group of `gpus` GPUs with one model on it. Seconds, bytes, tokens."""

    name: str
    text: str
    gpus: Count
    layers: Count
    max_context_tokens: Count  # positions that the model knows
    weights_bytes: Positive
    kv_bytes_per_token: Positive
    kv_capacity_tokens: Count  # of KV cache beside the weights
    linear: Curve  # all linear layers of one forward, by tokens in it
    head: Curve  # the output layer, by rows
    host_s: Value  # of an iteration, whatever is in it: scheduling, sampling, launches
    attention_floor_s: Value  # decode attention: the least an iteration takes for it
    attention_fixed_s: Value  # and, beyond the floor: fixed part
    attention_s_per_token: Value  # and part for each token of KV cache read
    prefill_attention_s_per_pair: Value  # for each pair of a new token and one that it looks at
    transfer_bytes_per_s: Value  # KV cache from one worker to another
    transfer_fixed_s: Value
    load_bytes_per_s: Value  # weights of a new version into the GPUs of a worker
    prepare_s: Value  # start of a process until it can load weights (paper Table 3)
    finalize_s: Value  # a new worker's first weights and its joining, together (paper Table 3)
    activate_s: Value  # restore a process's device state (paper Table 3)
    deactivate_s: Value  # give it back (paper Table 3)
    set_role_s: Value  # a running worker's change of role
    train_s: Value  # a train step of a batch of `train_batch` trajectories on `train_gpus` GPUs
    train_batch: Count
    train_gpus: Count
    prefill: Curve | None = None  # engines that compute chunks in passes of their own: by tokens, instead of `linear`

    @cached_property
    def load_s(self) -> float:
        """New weights into a running worker."""
        return self.weights_bytes / self.load_bytes_per_s.value

    @cached_property
    def join_s(self) -> float:
        """The first role of a new worker: what finalisation takes beside loading."""
        return max(0.0, self.finalize_s.value - self.load_s)

    def decode_attention_s(self, kv_tokens: float) -> float:
        """Reading `kv_tokens` tokens of KV cache in one iteration; 0 for none."""
        if kv_tokens <= 0:
            return 0.0
        return max(
            self.attention_floor_s.value,
            self.attention_fixed_s.value + kv_tokens * self.attention_s_per_token.value,
        )

    @cached_property
    def attention_knee_tokens(self) -> float:
        """KV tokens up to which decode attention takes its floor."""
        slope = self.attention_s_per_token.value
        over = self.attention_floor_s.value - self.attention_fixed_s.value
        return max(0.0, over / slope) if slope > 0 else math.inf

    def decode_s(self, sequences: int, kv_tokens: float) -> float:
        """One iteration that decodes a token of each of `sequences`, whose contexts are `kv_tokens` together (eq. 1: A + b B)."""
        return (
            self.host_s.value + self.linear.at(sequences) + self.head.at(sequences) + self.decode_attention_s(kv_tokens)
        )

    def prefill_attention_s(self, new: int, before: int) -> float:
        """Attention of `new` tokens that follow `before` others."""
        return self.prefill_attention_s_per_pair.value * new * (before + (new + 1) / 2)

    def iteration_s(
        self, sequences: int, kv_tokens: float, chunks: tuple[tuple[int, int], ...], completed: int
    ) -> float:
        """One iteration that decodes and prefills `chunks` of (new, before) tokens, of which `completed` contexts end.

        The weights are read once for both; what a chunk takes longer is what it interferes with decoding. With a curve of its
        own, `prefill`, chunks are computed in passes of their own, which delay decoding by all that they take.
        """
        new = sum(count for count, _ in chunks)
        if self.prefill is not None:
            decode_s = self.decode_s(sequences, kv_tokens) if sequences else 0.0
            return decode_s + self.prefill.at(new) + sum(self.prefill_attention_s(*chunk) for chunk in chunks)
        return (
            self.host_s.value
            + self.linear.at(sequences + new)
            + self.head.at(sequences + completed)
            + self.decode_attention_s(kv_tokens)
            + sum(self.prefill_attention_s(count, before) for count, before in chunks)
        )

    def transfer_s(self, tokens: int) -> float:
        """The KV cache of so many tokens from a prefill to a decode worker, with the link to itself (eq. 3)."""
        if tokens <= 0:
            return 0.0
        return self.transfer_fixed_s.value + tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s.value

    def train_step_s(self, trajectories: int, gpus: int) -> float:
        """A train step, if it takes as much longer as its batch is larger, and as much less as its GPUs are more."""
        return self.train_s.value * trajectories / self.train_batch * self.train_gpus / gpus

    # The closed forms' parameters (paper 4.3.1), for a cold start.

    def fixed_decode_s(self) -> float:
        """A of eq. 1."""
        return self.decode_s(1, 1)

    def decode_s_per_sequence(self, context_tokens: float, sequences: int = 16) -> float:
        """b of eq. 1, at this mean context: the mean slope up to a batch of `sequences`."""
        assert sequences > 1
        whole = self.decode_s(sequences, sequences * context_tokens)
        return max(0.0, (whole - self.fixed_decode_s()) / (sequences - 1))

    def prefill_s_per_token(self, new: int, before: int) -> float:
        """t_prefill of eq. 1, for `new` tokens after `before`: what they add to an iteration of decoding."""
        with_chunk = self.iteration_s(8, 8 * before, ((new, before),), 1)
        return (with_chunk - self.decode_s(8, 8 * before)) / new


def load(name: str) -> Hardware:
    """A built-in description by its name, or a JSON file by its path. Raises HardwareError.

    A file that goes by a built-in's name and says anything else (a copy that was edited) gets a name that shows it: reports
    and engines are labelled with it.
    """
    path = Path(__file__).parent / "hardware" / f"{name}.json" if name in BUILT_IN else Path(name)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"{path}: cannot be read ({error}); give a JSON file or one of {', '.join(BUILT_IN)}"
        ) from error
    found = parse(data, name)
    if name not in BUILT_IN and found.name in BUILT_IN and found != load(found.name):
        return msgspec.structs.replace(found, name=f"{found.name} (changed: {path.name})")
    return found


def parse(data: bytes, name: str = "hardware") -> Hardware:
    """Raises HardwareError."""
    try:
        found = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=Hardware)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HardwareError(f"{name}: {error}; the keys are those of services/timing/hardware.py") from error
    for key in ("linear", "head", "prefill"):
        curve: Curve | None = getattr(found, key)
        if curve is None:
            continue
        if len(curve.tokens) != len(curve.seconds) or not curve.tokens:
            raise HardwareError(f"{name}: {key}: as many seconds as tokens are needed, at least one")
        if any(later <= earlier for earlier, later in pairwise(curve.tokens)):
            raise HardwareError(f"{name}: {key}.tokens must increase")
    for key in ("transfer_bytes_per_s", "load_bytes_per_s"):
        if getattr(found, key).value <= 0:
            raise HardwareError(f"{name}: {key} must be above 0")
    return found
