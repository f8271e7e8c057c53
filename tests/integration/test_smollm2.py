"""SmolLM2-135M as a model of PEARL's: converted from the package that carries it, and generating real text in the torch engine."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from messages.ids import PolicyVersion, Role
from services import jobfile
from services.environments.loading import environment_factory, load_tokenizer
from services.environments.naming import Naming
from services.jobfile import ConfigError, EnvironmentSection, JobFile, RolloutSection
from services.models import smollm2
from services.models.config import ModelConfig
from services.models.files import read_weights
from services.rollout_worker.engines.base import GenerateSpec
from services.rollout_worker.engines.torch_engine import TorchEngine
from services.snapshot import write_folder

SHIPPED = Path(__file__).parents[2] / "deploy/smollm2.toml"
needs_weights = pytest.mark.skipif(
    bool(smollm2.missing()),
    reason=f"the packages {', '.join(smollm2.missing())} are not installed; `make smollm2` installs them",
)


def clear(folder: Path) -> None:
    """Half a gigabyte is not to be kept with the last runs' folders."""
    for file in folder.iterdir():
        file.unlink()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = smollm2.prepare(tmp_path_factory.mktemp("models") / "smollm2")
    assert smollm2.prepare(folder) == folder, "what is there is not made again"
    yield folder
    clear(folder)


@needs_weights
async def test_it_loads_and_says_what_any_model_of_english_would(model: Path) -> None:
    tokenizer = load_tokenizer(JobFile(environment=EnvironmentSection(tokenizer=str(model))))
    assert ModelConfig.load(model).architecture == "LlamaForCausalLM"
    text = "Two numbers, 135 and 42; naïve <|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.removesuffix("<|im_end|>") and ids[-1] == tokenizer.eos_id

    def fill(draft: Path) -> None:
        for file in model.iterdir():
            os.link(file, draft / file.name)

    snapshot = write_folder(fill, model.parent / "snapshots", 0)
    engine = TorchEngine(RolloutSection(kv_cache_tokens=2048, max_running=4), "cpu")
    await engine.start()
    try:
        await engine.load_snapshot(snapshot.uri, PolicyVersion(0))
        await engine.set_role(Role.COLOCATED)
        spec = GenerateSpec(
            request="r",
            attempt=1,
            prompt=tokenizer.encode("The capital of France is"),
            prefix=[],
            max_new_tokens=8,
            temperature=0.0,
            seed=0,
            stop_ids=[tokenizer.eos_id],
        )
        chunks = [chunk async for chunk in engine.generate(spec)]
    finally:
        await engine.stop()
        clear(Path(snapshot.uri))
    said = tokenizer.decode([token for chunk in chunks for token in chunk.tokens])
    assert said.startswith(" Paris"), said
    assert chunks[-1].finish in ("stop", "length")


@needs_weights
def test_it_computes_what_transformers_does(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model)
    from services.models import Decoder, load_weights

    ours = Decoder(ModelConfig.load(model))
    load_weights(ours, model)
    tokens = torch.tensor([[1, 4093, 198, 5820, 253, 7302, 30, 2]])
    with torch.no_grad():
        assert torch.allclose(ours(tokens), oracle(tokens).logits, atol=2e-3)
    assert len(read_weights(model)) == 272


def test_what_is_missing_is_named_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "missing", lambda: ["gguf"])
    with pytest.raises(ConfigError, match="needs gguf: run `make smollm2`"):
        smollm2.prepare(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_rows_of_a_head_are_halves_again() -> None:
    heads, half = 3, 4
    halves = torch.arange(heads * 2 * half * 5, dtype=torch.float32).reshape(heads * 2 * half, 5)
    paired = halves.reshape(heads, 2, half, 5).transpose(1, 2).reshape(halves.shape)  # as GGUF files have them
    assert not torch.equal(paired, halves)
    assert torch.equal(smollm2.unpaired(paired, heads), halves)


def test_the_shipped_job_is_whole() -> None:
    job = jobfile.load(SHIPPED)
    assert job.model.path == job.environment.tokenizer
    assert f"smollm2 {job.model.path}" in (SHIPPED.parents[1] / "Makefile").read_text()
    assert isinstance(environment_factory(job)(), Naming)
    assert tomllib.loads(SHIPPED.read_text())["training"]["keep_snapshots"] >= 1


@pytest.mark.parametrize(("answer", "reward"), [(" Blue.", 1.0), ("It is blue.", 0.3), ("Tuesday", 0.0), ("", 0.0)])
async def test_naming_judges_any_answer(answer: str, reward: float) -> None:
    environment = Naming()
    seed = 0
    while "a colour" not in (question := await environment.reset(seed)):
        seed += 1
    assert question == await environment.reset(seed)
    result = await environment.step(answer)
    assert (result.reward, result.done) == (reward, True)
