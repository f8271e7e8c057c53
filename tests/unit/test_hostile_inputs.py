"""Hostile variants of every message: read for what it says or refused in words, by the wire layer and by every core.

The whole job under such messages is in tests/integration/test_hostile_events.py; here there are two hundred of each kind (tests/conftest.py).
Of what a core takes: it does not raise, what it refuses leaves no trace, and its state can be written to a checkpoint and read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from messages.envelope import LONGEST_REASON, Message, UndecodableMessage, encode
from messages.subjects import ROUTES, decode_on, subject_of
from services import jobfile
from services.cluster_rebuilder.config import Config as RebuilderConfig
from services.cluster_rebuilder.core import ClusterRebuilderCore
from services.decision_engine.config import Config as DecisionConfig
from services.decision_engine.core import DecisionEngineCore
from services.elastic_scheduler.config import Config as ElasticConfig
from services.elastic_scheduler.core import ElasticSchedulerCore
from services.orchestrator.config import Config as OrchestratorConfig
from services.orchestrator.core import OrchestratorCore
from services.pipeline_scheduler.config import Config as PipelineConfig
from services.pipeline_scheduler.core import PipelineSchedulerCore
from services.runtime.core import Input, Note, Refuse, Tick
from services.runtime_tracker.config import Config as TrackerConfig
from services.runtime_tracker.core import RuntimeTrackerCore
from services.toggle_manager.config import Config as ToggleConfig
from services.toggle_manager.core import ToggleManagerCore
from tests.contract.samples import sample
from tests.unit.mutations import data, texts

EXAMPLES = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
JOB = "job"
FILE = """
[job]
name = "job"
[[nodes]]
name = "node"
zone = "reserved"
gpus = 8
[[nodes]]
name = "spot"
zone = "preemptible"
gpus = 2
[[nodes]]
name = "train"
zone = "training"
gpus = 2
[decision]
lending = true
disaggregation = true
"""
WORKERS = ("node-w0", "node-w1", "spot-w0", "train-w0", "train-t0")
KINDS = [kind for kind, route in ROUTES.items() if route.family != "reply"]


def subject_for(kind: type[Message]) -> str:
    return subject_of(JOB, sample(kind))


def variants(kind: type[Message]) -> st.SearchStrategy[bytes]:
    good = encode(sample(kind))
    if kind.bulk:
        body = msgspec.msgpack.decode(good)
        return st.one_of(data(body).map(_packed), st.binary(max_size=200))
    body = msgspec.json.decode(good)
    return st.one_of(
        data(body).map(lambda each: json.dumps(each).encode("utf-8", "surrogatepass")),
        texts(good.decode()).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.binary(max_size=200),
    )


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return b"\xc1"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_on_its_subject_it_is_read_or_refused(kind: type[Message]) -> None:
    subject = subject_for(kind)
    refused = 0

    @EXAMPLES
    @given(variants(kind))
    def check(raw: bytes) -> None:
        nonlocal refused
        try:
            message = decode_on(JOB, subject, raw, kind)
        except UndecodableMessage as error:
            refused += 1
            assert 0 < len(error.reason) <= LONGEST_REASON
            return
        again = decode_on(JOB, subject, encode(message), kind)
        assert type(message) is kind and encode(again) == encode(
            message
        )  # by bytes: MessagePack has numbers that are none

    check()
    assert refused > settings().max_examples / 4, "the variants are hostile"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> jobfile.JobFile:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(FILE)
    return jobfile.load(path)


CORES: dict[str, Any] = {
    "elastic_scheduler": lambda job: ElasticSchedulerCore(ElasticConfig.of(job)),
    "decision_engine": lambda job: DecisionEngineCore(DecisionConfig.of(job)),
    "cluster_rebuilder": lambda job: ClusterRebuilderCore(RebuilderConfig.of(job)),
    "toggle_manager": lambda job: ToggleManagerCore(ToggleConfig.of(job)),
    "runtime_tracker": lambda job: RuntimeTrackerCore(TrackerConfig.of(job)),
    "pipeline_scheduler": lambda job: PipelineSchedulerCore(PipelineConfig.of(job)),
}


def plausible(kind: type[Message]) -> dict[str, Any]:
    """A sample whose names are those of the job, so that it is not refused for them alone."""
    body: dict[str, Any] = msgspec.to_builtins(sample(kind))
    return {**body, **{key: value for key, value in (("worker", "node-w0"), ("node", "node")) if key in body}}


@st.composite
def messages(draw: st.DrawFn, kinds: tuple[type[Message], ...]) -> Message | None:
    """A well-formed message with hostile values; None where the wire layer would not let it in."""
    kind = draw(st.sampled_from(kinds))
    body = plausible(kind)
    for key in draw(st.lists(st.sampled_from(sorted(body)), max_size=3)):
        value = body[key]
        if isinstance(value, bool) or key == "kind":
            continue
        if isinstance(value, int):
            body[key] = draw(st.one_of(st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1)))
        elif isinstance(value, float):
            body[key] = draw(st.floats(allow_nan=False, allow_infinity=False))
        elif isinstance(value, str):
            body[key] = draw(st.one_of(st.sampled_from(WORKERS), st.text(max_size=5), st.just("x" * 5000)))
        else:
            body[key] = draw(data(value))
    try:
        raw = json.dumps(body).encode()
        message = msgspec.json.decode(raw, type=kind)
        return decode_on(JOB, subject_of(JOB, message), encode(message), kind)
    except (msgspec.MsgspecError, UndecodableMessage, UnicodeEncodeError):
        return None


@pytest.mark.parametrize("name", CORES)
def test_a_core_takes_or_refuses_what_is_well_formed(name: str, job: jobfile.JobFile) -> None:
    core = CORES[name](job)
    kinds: tuple[type[Message], ...] = (*core.inputs, *getattr(core, "telemetry", ()))
    refused = 0

    @EXAMPLES
    @given(st.lists(messages(kinds), min_size=1, max_size=8))
    def check(said: list[Message | None]) -> None:
        nonlocal refused
        state = core.initial()
        for number, message in enumerate(each for each in said if each is not None):
            for event in (Input(1000 * number, message, number + 1), Input(1000 * number + 500, Tick())):
                before = msgspec.msgpack.encode(state)
                after, effects = core.step(state, event)
                assert msgspec.msgpack.encode(state) == before, "a state is never changed in place"
                reasons = [effect.reason for effect in effects if isinstance(effect, Refuse)]
                if reasons:
                    refused += 1
                    assert all(reasons) and all(len(reason) < 20_000 for reason in reasons)
                    continue  # as the host: what is refused leaves no trace
                state = after
                assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=core.state_type) == state

    check()
    assert refused > 10


def test_the_orchestrator_takes_or_refuses_what_is_well_formed(job: jobfile.JobFile) -> None:
    core = OrchestratorCore(OrchestratorConfig.of(job))
    refused = 0

    @EXAMPLES
    @given(st.lists(messages(core.inputs), min_size=1, max_size=8))
    def check(said: list[Message | None]) -> None:
        nonlocal refused
        table = core.initial()
        for number, message in enumerate(each for each in said if each is not None):
            before = table
            table, (effects,), _ = core.step_all(table, [Input(1000 * number, message, number + 1)])
            if any(isinstance(effect, Refuse) for effect in effects):
                refused += 1
                assert all(isinstance(effect, Refuse | Note) for effect in effects)
                assert table.rows == before.rows, "what is refused changes no row"
            table, _, _ = core.step_all(table, [Input(1000 * number + 500, Tick())])

    check()
    assert refused > 10


def test_every_core_is_here() -> None:
    root = Path(jobfile.__file__).parents[1]
    hosted = {path.parent.name for path in root.glob("*/service.py") if "CoreHost(" in path.read_text(encoding="utf-8")}
    assert hosted <= CORES.keys()
