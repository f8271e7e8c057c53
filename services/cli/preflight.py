"""What can be known to be wrong before anything starts: files, model, environment, trace, nodes, port. Used by `up` and `demo`.

A service finds the same out by itself, but in its own log and after everything else runs. Each check raises a
ConfigError that says what, where and what to do.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from messages.ids import Zone
from services.agent.config import Config as AgentConfig
from services.cli.runs import check_reachable
from services.decision_engine.config import Config as DecisionConfig
from services.environments.base import Tokenizer
from services.environments.loading import environment_factory, load_tokenizer
from services.harness.config import Config as HarnessConfig
from services.jobfile import ConfigError, JobFile
from services.nats_server.keys import KeyFileError, ensure_keys, seed_path
from services.nats_server.permissions import SENDS, users
from services.nats_server.process import EmbeddedServer, ServerError, find_binary, is_free, keys_dir
from services.node_agent.config import Config as NodeConfig
from services.preemption_feed.config import Config as FeedConfig
from services.rollout_worker.config import Config as WorkerConfig
from services.trainer.config import Config as TrainerConfig


def preflight(job: JobFile, job_path: Path) -> None:
    """Raises ConfigError for the first thing that would keep the job from running on this machine."""
    check_nodes(job)
    _check_data_dir(job)
    check_configs(job, job_path)
    _check_nats(job)
    tokenizer = check_environment(job)
    _check_model(job, tokenizer)


def check_nodes(job: JobFile) -> None:
    """Something trains, something generates. Raises ConfigError."""
    if not job.nodes:
        raise ConfigError("nodes: there is none; add a [[nodes]] table for each machine (name, zone, gpus)")
    if not any(node.zone is Zone.TRAINING for node in job.nodes):
        raise ConfigError('nodes: none has zone = "training"; without one nothing is trained: add one')
    if not any(node.zone in (Zone.RESERVED, Zone.PREEMPTIBLE) for node in job.nodes) and not job.decision.lending:
        raise ConfigError(
            'nodes: none has zone = "reserved" or "preemptible", so nothing generates: add one, or lend training GPUs '
            "(decision.lending = true)"
        )


def _check_data_dir(job: JobFile) -> None:
    """The run's folder can be made and written."""
    try:
        job.run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=job.run_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"job.data_dir = {job.job.data_dir!r}: {job.run_dir.absolute()} cannot be written ({error.strerror or error}); "
            "choose another folder, or correct its permissions"
        ) from error


def check_configs(job: JobFile, job_path: Path) -> None:
    """What each service reads of the job file."""
    AgentConfig.of(job)
    DecisionConfig.of(job)
    FeedConfig.of(job)
    TrainerConfig.of(job)
    for node in job.nodes:
        WorkerConfig.of(job, node.name)
        NodeConfig.of(job, node.name, job_path)
    if job.harness.processes:
        HarnessConfig.of(job)
    if job.rollout.engine == "emulated" or job.training.engine == "emulated":
        from services.timing import hardware

        hardware.load(job.emulation.hardware)


def _check_nats(job: JobFile) -> None:
    if not job.nats.embedded:
        _check_foreign_nats(job)
        return
    try:
        find_binary(job)
        if job.nats.cluster:
            check_reachable(job)
            return
        server = EmbeddedServer(job)
        if server.pid is None and job.nats.port and not is_free(job.nats.port):
            raise ConfigError(f"nats.port = {job.nats.port} is taken: set another, or 0 for any free one")
        ensure_keys(keys_dir(job), [user.name for user in users(job)])
    except (ServerError, KeyFileError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{keys_dir(job)}: keys cannot be kept there ({error.strerror or error})") from error


def _check_foreign_nats(job: JobFile) -> None:
    """A server of one's own: its keys are there, and something listens."""
    if job.nats.keys_dir:
        missing = [user for user in sorted(SENDS) if not seed_path(keys_dir(job), user).is_file()]
        if missing:
            raise ConfigError(
                f"nats.keys_dir = {job.nats.keys_dir!r}: there is no {missing[0]}.nk; see deploy/README.md"
            )
    check_reachable(job)


def check_environment(job: JobFile) -> Tokenizer:
    """An environment (which is not begun: that may cost something) and the tokenizer can be made."""
    environment_factory(job)
    return load_tokenizer(job)


def _check_model(job: JobFile, tokenizer: Tokenizer) -> None:
    """The model's files are there, whole, and fit the decoder and the tokenizer."""
    if job.rollout.engine != "torch" and job.training.engine != "torch":
        return
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("torch is not installed, which engine and trainer need; see README, or use --engine emulated")
    if job.model.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError('model.device = "cuda": torch sees no CUDA device here; use "auto" or "cpu"')
    if job.model.path.startswith("builtin:"):
        if job.model.path != "builtin:tiny":
            raise ConfigError(f"model.path = {job.model.path!r}: the only built-in model is 'builtin:tiny'")
        return
    from services.models.files import check_weights  # torch: heavy

    config = check_weights(job.model.path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"environment.tokenizer = {job.environment.tokenizer!r} has {tokenizer.vocab_size} ids, the model "
            f"{job.model.path} only {config.vocab_size}: they do not belong together"
        )
