"""The runtime tracker's core: telemetry into sums, sums into one workload profile a train step (paper 4.3.2, 5). Pure.

What is fitted how:

- `r`, `dL`, `retained`: means over the step's turns.
- `S`, `T_env`: turns and environment seconds of the step's trajectory with the most turns. (By the clock the slowest
  would often be one that a preemption held up, which is not a property of the workload.)
- `theta = (1 - f) / f` with f the share of its turns' time that a trajectory decodes.
- `A`, `b`: least squares of seconds a decode iteration on its batch size, from the differences of heartbeat sums,
  samples of earlier steps counting less and less; `t_prefill` likewise, as a quotient.
- the KV cache of a trajectory: its mean tokens times the bytes of one.

All but `A`, `b` and `t_prefill` are moving averages over steps. Samples right after a worker's start or switch are
left out. Losing telemetry costs accuracy, nothing else.
"""

from __future__ import annotations

import math

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.envelope import Message, brief
from messages.pipeline_scheduler import StepFinished, TrajectoryCompleted
from messages.runtime_tracker import OperationTimed, RequestFinished, WorkerHeartbeat
from pearl_state.peers import wrong_batch
from services.runtime.core import Effects, Input, Note, Refuse, Send, Tick
from services.runtime_tracker.config import Config
from services.runtime_tracker.fit import Line, average

OPERATIONS = (
    "prepare",
    "finalize",
    "activate",
    "deactivate",
    "drain",
    "set_role",
    "update_weights",
)
"""The operations of `operation.timed/1` whose cost is learned."""


class WorkerSums(msgspec.Struct, frozen=True):
    """A worker's last heartbeat that was sampled: the next sample is the difference to it."""

    incarnation: int
    serving: bool
    skip: int  # samples still to leave out
    at_ms: int
    iterations: int
    decode_s: float
    batch_sum: int
    prefill_tokens: int
    prefill_s: float


class StepSums(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen since the last train step ended."""

    requests: int = 0
    new_tokens: int = 0
    generated: int = 0
    retained: int = 0
    decode_s: float = 0.0
    other_s: float = 0.0  # waiting for the first token, and the environment
    trajectories: int = 0
    turns: int = 0
    longest_turns: int = 0
    longest_env_s: float = 0.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Bounded: one entry a worker, one cost an operation, sums."""

    step: StepSums = StepSums()
    workers: dict[str, WorkerSums] = {}  # never changed in place
    decode: Line = Line()
    prefill_tokens: float = 0.0
    prefill_s: float = 0.0
    costs: dict[str, float] = {}
    profile: WorkloadProfile | None = None  # the last one emitted
    measured: bool = False  # some step's turns are in `profile`, which is then more than the cold start's


class RuntimeTrackerCore:
    """Emits one `workload.profile/1` for each train step that finishes."""

    name = "runtime_tracker"
    inputs: tuple[type[Message], ...] = (StepFinished, TrajectoryCompleted)
    telemetry = (RequestFinished, WorkerHeartbeat, OperationTimed)
    state_type = State

    def __init__(self, config: Config) -> None:
        self.config = config

    def initial(self) -> State:
        return State()

    def step(self, state: State, event: Input) -> tuple[State, Effects]:
        match event.message:
            case WorkerHeartbeat() as message:
                return self.on_heartbeat(state, message, event.now_ms)
            case RequestFinished() as message:
                return self.on_request(state, message)
            case OperationTimed() as message:
                return self.on_operation(state, message)
            case TrajectoryCompleted() as message:
                return self.on_trajectory(state, message)
            case StepFinished() as message:
                return self.on_step(state, message)
            case Tick():
                return state, ()
            case other:
                return state, (Refuse(f"the runtime tracker does not handle {type(other).__name__}"),)

    def on_heartbeat(self, state: State, message: WorkerHeartbeat, now_ms: int) -> tuple[State, Effects]:
        """One sample of decode and prefill speed, at most every `sample_ms` a worker."""
        if self._is_stranger(message.worker):
            return state, (Refuse(f"heartbeat of {brief(message.worker, 80)!r}, which is no slot of the job file"),)
        last = state.workers.get(message.worker)
        if last is None:
            if len(state.workers) >= self.config.most_workers:
                return state, ()
        elif message.incarnation < last.incarnation:
            return state, ()
        elif message.incarnation > last.incarnation or message.serving != last.serving:
            last = None
        elif now_ms - last.at_ms < self.config.sample_ms:
            return state, ()
        if not _sound(message.decode_s, message.prefill_s) or _negative(
            message.decode_iterations, message.decode_batch_sum, message.prefill_tokens
        ):
            return state, (Refuse(f"heartbeat of {message.worker}: sums must be finite and not negative"),)
        sums = WorkerSums(
            message.incarnation,
            message.serving,
            self.config.skip_samples if last is None else max(0, last.skip - 1),
            now_ms,
            message.decode_iterations,
            message.decode_s,
            message.decode_batch_sum,
            message.prefill_tokens,
            message.prefill_s,
        )
        state = msgspec.structs.replace(state, workers={**state.workers, message.worker: sums})
        return (state if last is None or last.skip > 0 else _sampled(state, last, sums)), ()

    def on_request(self, state: State, message: RequestFinished) -> tuple[State, Effects]:
        """One turn as its edge saw it."""
        if not _sound(message.queue_s, message.decode_s, message.env_s) or _negative(
            message.new_prompt_tokens, message.generated_tokens, message.retained_tokens
        ):
            return state, (Refuse(f"request {message.request}: counts and times must be finite and not negative"),)
        most = self.config.max_context_tokens
        if self._is_stranger(message.worker) or max(message.new_prompt_tokens, message.generated_tokens) > most:
            text = f"on {brief(message.worker, 80)!r}, of {message.new_prompt_tokens} and {message.generated_tokens} tokens"
            return state, (Refuse(f"request {message.request} {text}: no such slot, or longer than a context"),)
        sums = state.step
        step = msgspec.structs.replace(
            sums,
            requests=sums.requests + 1,
            new_tokens=sums.new_tokens + message.new_prompt_tokens,
            generated=sums.generated + message.generated_tokens,
            retained=sums.retained + message.retained_tokens,
            decode_s=sums.decode_s + message.decode_s,
            other_s=sums.other_s + message.queue_s + message.env_s,
        )
        return msgspec.structs.replace(state, step=step), ()

    def on_operation(self, state: State, message: OperationTimed) -> tuple[State, Effects]:
        """The moving average of what an operation costs (paper 5)."""
        if message.operation not in OPERATIONS:
            return state, (Refuse(f"operation {brief(message.operation, 40)!r} is none of {', '.join(OPERATIONS)}"),)
        if not _sound(message.took_s):
            return state, (Refuse(f"operation {message.operation}: took {message.took_s} s"),)
        old = state.costs.get(message.operation)
        if old is None and len(state.costs) >= self.config.most_operations:
            return state, (Refuse(f"operation {message.operation}: more than {self.config.most_operations} kinds"),)
        cost = average(old, message.took_s, self.config.new_share)
        return msgspec.structs.replace(state, costs={**state.costs, message.operation: cost}), ()

    def on_trajectory(self, state: State, message: TrajectoryCompleted) -> tuple[State, Effects]:
        """How long trajectories are. Failed ones say nothing about the workload."""
        if not 0 <= message.turns <= self.config.max_turns or not _sound(message.env_s):
            return state, (
                Refuse(f"trajectory {message.trajectory}: {message.turns} turns, {message.env_s} s of environment"),
            )
        if message.status == "failed":
            return state, ()
        sums = state.step
        longest = (sums.longest_turns, sums.longest_env_s)
        turns, env_s = max(longest, (message.turns, message.env_s))
        step = msgspec.structs.replace(
            sums,
            trajectories=sums.trajectories + 1,
            turns=sums.turns + message.turns,
            longest_turns=turns,
            longest_env_s=env_s,
        )
        return msgspec.structs.replace(state, step=step), ()

    def on_step(self, state: State, message: StepFinished) -> tuple[State, Effects]:
        """A train step ended: refit, emit, begin anew."""
        if wrong := wrong_batch(message.batch, self.config.train_steps):
            return state, (Refuse(wrong),)
        if state.profile is not None and message.batch <= state.profile.train_step:
            return state, ()
        profile = self._refit(state, message.batch)
        keep = 1 - self.config.new_share
        state = msgspec.structs.replace(
            state,
            step=StepSums(),
            decode=state.decode.decayed(keep),
            prefill_tokens=state.prefill_tokens * keep,
            prefill_s=state.prefill_s * keep,
            profile=profile,
            measured=state.measured or profile.samples > 0,
        )
        text = (
            f"after step {profile.train_step}: S={profile.S:.1f} r={profile.r:.1f} dL={profile.dL:.1f} "
            f"theta={profile.theta:.2f} A={profile.A_s * 1e3:.2f} ms b={profile.b_s * 1e3:.3f} ms ({profile.samples} turns)"
        )
        return state, (Send(profile), Note("profile", text))

    def _is_stranger(self, worker: str) -> bool:
        return self.config.workers is not None and worker not in self.config.workers

    def _refit(self, state: State, train_step: int) -> WorkloadProfile:
        sums, before = state.step, state.profile
        base = self.config.cold_start if before is None else before

        def moved(name: str, new: float) -> float:
            return average(float(getattr(base, name)) if state.measured else None, new, self.config.new_share)

        changes: dict[str, float] = {}
        if sums.requests:
            changes["r"] = moved("r", sums.generated / sums.requests)
            changes["dL"] = moved("dL", sums.new_tokens / sums.requests)
            changes["retained"] = moved("retained", sums.retained / sums.requests)
            if sums.decode_s > 0:
                changes["theta"] = moved("theta", sums.other_s / sums.decode_s)
        if sums.trajectories:
            changes["S"] = moved("S", float(sums.longest_turns))
            changes["T_env_s"] = moved("T_env_s", sums.longest_env_s)
            if sums.requests:
                tokens = sums.turns / sums.trajectories * (sums.generated + sums.new_tokens) / sums.requests
                changes["kv_bytes_per_trajectory"] = moved("kv_bytes_per_trajectory", tokens * base.kv_bytes_per_token)
        changes["A_s"], changes["b_s"] = state.decode.fit(base.A_s, base.b_s)
        if state.prefill_tokens > 0:
            changes["t_prefill_s"] = state.prefill_s / state.prefill_tokens
        return msgspec.structs.replace(
            base, train_step=train_step, samples=sums.requests, costs=dict(sorted(state.costs.items())), **changes
        )


def _sampled(state: State, last: WorkerSums, new: WorkerSums) -> State:
    """With the difference of two heartbeats of one incarnation. Sums that went backwards are a new baseline only."""
    iterations, decode_s = new.iterations - last.iterations, new.decode_s - last.decode_s
    batch_sum = new.batch_sum - last.batch_sum
    tokens, prefill_s = new.prefill_tokens - last.prefill_tokens, new.prefill_s - last.prefill_s
    if min(iterations, batch_sum, tokens) < 0 or min(decode_s, prefill_s) < 0:
        return state
    decode = state.decode
    if iterations > 0:
        decode = decode.add(batch_sum / iterations, decode_s / iterations, float(iterations))
    return msgspec.structs.replace(
        state,
        decode=decode,
        prefill_tokens=state.prefill_tokens + tokens,
        prefill_s=state.prefill_s + prefill_s,
    )


def _sound(*seconds: float) -> bool:
    return all(math.isfinite(value) and 0 <= value < 1e9 for value in seconds)


def _negative(*counts: int) -> bool:
    return min(counts) < 0
