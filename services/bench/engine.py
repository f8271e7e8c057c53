"""`pearl bench engine`: the embedded engine's tokens a second beside a plain transformers loop, one thread each.

Same model (the built-in one), same prompts, same sampling temperature, same number of tokens. "In service" is the engine
behind worker, server and edge, which share one process here; the plain loop decodes one padded batch with its KV cache and
knows nothing of requests that come and go. Without transformers there is no reference.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from services.bench.cell import cell, job_in
from services.bench.figures import Figure, figure
from services.bench.stream import askers, many, prompt_of
from services.models.config import ModelConfig

TARGET_BATCH = 16
REFERENCE = "transformers loop"


async def measure(
    folder: Path, *, batches: Sequence[int] = (1, 16, 64), tokens: int = 128, rounds: int = 5
) -> list[Figure]:
    """Tokens a second: the best of `rounds`, each way in turn, so that a busy machine disturbs all alike."""
    job, _ = job_in(folder, 1)
    found: list[Figure] = []
    torch.set_num_threads(1)
    async with cell(job) as running:
        model_dir = job.run_dir / "models" / "initial"
        vocabulary = ModelConfig.load(str(model_dir)).vocab_size
        bare = _load(model_dir)
        direct, through = askers(running, tokens, vocabulary)
        for batch in batches:
            best = {"direct": 0.0, "in service": 0.0, REFERENCE: 0.0}
            for round_ in range(rounds + 1):
                for name, ask in (("direct", direct), ("in service", through)):
                    begun = time.perf_counter()
                    count = await many(ask, f"b{batch}r{round_}-", 1, batch)
                    rate = count / (time.perf_counter() - begun)
                    best[name] = max(best[name], rate if round_ else 0.0)
                if bare is not None:
                    prompts = [prompt_of(f"{round_}/{index}", vocabulary) for index in range(batch)]
                    rate = await asyncio.to_thread(_bare_rate, bare, prompts, tokens)
                    best[REFERENCE] = max(best[REFERENCE], rate if round_ else 0.0)
            reference = best[REFERENCE] or None
            found += [
                figure(
                    "engine",
                    f"batch {batch}, {name}",
                    best[name],
                    "tokens/s",
                    reference,
                    REFERENCE if reference else "transformers is not installed",
                    ratio_from=1.0 if (batch, name) == (TARGET_BATCH, "in service") else None,
                )
                for name in ("direct", "in service")
            ]
    return found


def _load(directory: Path) -> Any:  # Any: a model of transformers, which is an optional library
    if importlib.util.find_spec("transformers") is None:
        return None
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    return library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _bare_rate(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens a second of sampling one batch with a KV cache."""
    torch.set_num_threads(1)
    # Releases before 5.x have the older name only.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    begun = time.perf_counter()
    with torch.inference_mode():
        ids = torch.tensor(prompts)
        cache: Any = None
        for _ in range(tokens):
            out = model(input_ids=ids, use_cache=True, **{named: cache})
            cache = out[named]
            ids = torch.multinomial(torch.softmax(out.logits[:, -1], dim=-1), 1)
    return len(prompts) * tokens / (time.perf_counter() - begun)
