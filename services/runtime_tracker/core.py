"""The runtime tracker's core: telemetry into sums, sums into one workload profile a train step (paper 4.3.2, 5). Pure.

What is fitted how, the same in both execution modes:

- `r`: tokens a turn that decode iterations made; `dL`: prompt tokens a turn that were computed: the new ones, and those of
  the past that no cache held. Both from workers' sums, whatever their role: a prefill worker has no decode iterations, a
  decode worker prefills nothing. Without heartbeats, what the edges saw generated and added.
- `retained`: mean over the step's turns.
- `S`, `T_env`: turns and environment seconds of the step's trajectory with the most turns. (By the clock the slowest
  would often be one that a preemption held up, which is not a property of the workload.)
- `theta = (1 - f) / f` with f the share of trajectories that decode among those that decode or are with their
  environment, in neither queue. Those that wait for or are in prefill are left out: eq. 3 has them, and counting them here
  would make a bubble of every queue that another ratio removes.
- `A`, `b`: least squares of seconds a decode iteration on its batch size, from the differences of heartbeat sums,
  samples of earlier steps counting less and less; `t_prefill` likewise, as a quotient: of colocated workers, where it is what
  prompts add to iterations; of prefill workers only while no other was measured, and then without the fixed part A of a turn's iteration, where
  the engine pays it for prompts alone (`fused`).
- `T_over`: what colocated turns took beyond eq. 1's prefill and decode at the load there was. It keeps its value while
  rollout is disaggregated.
- the KV cache of a trajectory: its mean tokens times the bytes of one.
- `sample`: the newest trajectories, turn by turn (`sample.py`).

All but `A`, `b` and `t_prefill` are moving averages over steps. Speeds measured right after a worker's start, switch or
activation are left out. Losing telemetry costs accuracy, nothing else.
"""

from __future__ import annotations

import math

import msgspec

from messages.decision_engine import WorkloadProfile
from messages.envelope import Message, brief
from messages.ids import Role
from messages.orchestrator import RoleSet, WorkerActivated
from messages.pipeline_scheduler import StepFinished, TrajectoryCompleted
from messages.runtime_tracker import OperationTimed, RequestFinished, WorkerHeartbeat
from pearl_state.peers import wrong_batch
from services.runtime.core import Effects, Input, Note, Refuse, Send, Tick
from services.runtime_tracker.config import Config
from services.runtime_tracker.fit import Line, average
from services.runtime_tracker.sample import Sample

OPERATIONS = (
    "prepare",
    "finalize",
    "activate",
    "deactivate",
    "drain",
    "set_role",
    "update_weights",
    "toggled_step",
    "plain_step",
)
"""The operations of `operation.timed/1` whose cost is learned."""


LEAST_PREFILL_SHARE = 0.2
"""Of what prefill workers take for a token, that at least is the token's, whatever A is."""


class Sums(msgspec.Struct, frozen=True):
    """A worker's cumulative sums at one moment."""

    at_ms: int
    iterations: int
    decode_s: float
    batch_sum: int
    decoded: int
    prefill_tokens: int
    prefill_s: float


class WorkerSums(msgspec.Struct, frozen=True):
    """A worker's last heartbeat, and the one at which its last speed sample ended."""

    incarnation: int
    serving: bool
    skip: int  # speed samples still to leave out
    seen: Sums
    sampled: Sums


class Switched(msgspec.Struct, frozen=True):
    """A worker's role, and since when."""

    incarnation: int
    role: Role
    at_ms: int


class StepSums(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen since the last train step ended."""

    since_ms: int = 0  # first telemetry of the step
    requests: int = 0
    new_tokens: int = 0
    generated: int = 0
    retained: int = 0
    engine_s: float = 0.0  # seconds that requests spent with the workers, waiting included
    edge_decode_s: float = 0.0  # of those, from the first token to the last
    env_s: float = 0.0
    prefilled: int = 0
    decoded: int = 0
    decoding_s: float = 0.0  # seconds times sequences in decode iterations
    colocated_ms: int = 0  # milliseconds times colocated workers
    disaggregated_ms: int = 0
    trajectories: int = 0
    turns: int = 0
    longest_turns: int = 0
    longest_env_s: float = 0.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Bounded: one entry a worker, one cost an operation, sums."""

    step: StepSums = StepSums()
    workers: dict[str, WorkerSums] = {}  # never changed in place
    switched: dict[str, Switched] = {}
    decode: Line = Line()
    prefill_tokens: float = 0.0
    prefill_s: float = 0.0
    alone_tokens: float = 0.0  # the same of prefill workers, whose iterations hold nothing else
    alone_s: float = 0.0
    costs: dict[str, float] = {}
    profile: WorkloadProfile | None = None  # the last one emitted
    measured: bool = False  # some step's turns are in `profile`, which is then more than the cold start's
    sample: Sample = Sample()


class RuntimeTrackerCore:
    """Emits one `workload.profile/1` for each train step that finishes."""

    name = "runtime_tracker"
    inputs: tuple[type[Message], ...] = (StepFinished, TrajectoryCompleted, RoleSet, WorkerActivated)
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
                return self.on_request(state, message, event.now_ms)
            case RoleSet() | WorkerActivated() as message:
                return self.on_switch(state, message, event.now_ms), ()
            case OperationTimed() as message:
                return self.on_operation(state, message)
            case TrajectoryCompleted() as message:
                return self.on_trajectory(state, message)
            case StepFinished() as message:
                return self.on_step(state, message, event.now_ms)
            case Tick():
                return state, ()
            case other:
                return state, (Refuse(f"the runtime tracker does not handle {type(other).__name__}"),)

    def on_heartbeat(self, state: State, message: WorkerHeartbeat, now_ms: int) -> tuple[State, Effects]:
        """What the worker did since its last one; and, every `sample_ms`, one sample of its decode and prefill speed."""
        if self._is_stranger(message.worker):
            return state, (Refuse(f"heartbeat of {brief(message.worker, 80)!r}, which is no slot of the job file"),)
        last = state.workers.get(message.worker)
        if last is None:
            if len(state.workers) >= self.config.most_workers:
                return state, ()
        elif message.incarnation < last.incarnation:
            return state, ()
        if not _sound(message.decode_s, message.prefill_s) or _negative(
            message.decode_iterations, message.decode_batch_sum, message.decode_tokens, message.prefill_tokens
        ):
            return state, (Refuse(f"heartbeat of {message.worker}: sums must be finite and not negative"),)
        sums = Sums(
            now_ms,
            message.decode_iterations,
            message.decode_s,
            message.decode_batch_sum,
            message.decode_tokens,
            message.prefill_tokens,
            message.prefill_s,
        )
        if last is not None and message.incarnation == last.incarnation:
            state = msgspec.structs.replace(state, step=self._counted(state, message.worker, last.seen, sums))
        if last is None or message.incarnation != last.incarnation or message.serving != last.serving:
            new = WorkerSums(message.incarnation, message.serving, self.config.skip_samples, sums, sums)
        elif now_ms - last.sampled.at_ms < self.config.sample_ms:
            new = msgspec.structs.replace(last, seen=sums)
        else:
            new = WorkerSums(message.incarnation, message.serving, max(0, last.skip - 1), sums, sums)
            if last.skip == 0 and not self._warming(state, message.worker, last.sampled.at_ms):
                role = state.switched.get(message.worker)
                alone = role is not None and role.role is Role.PREFILL
                state = _sampled(state, last.sampled, sums, alone=alone)
        return msgspec.structs.replace(state, workers={**state.workers, message.worker: new}), ()

    def on_switch(self, state: State, message: RoleSet | WorkerActivated, now_ms: int) -> State:
        """A worker took a role or its device state: what it does in the next moments is warm-up."""
        known = state.switched.get(message.worker)
        if known is None and len(state.switched) >= self.config.most_workers:
            return state
        if known is not None and message.incarnation < known.incarnation:
            return state
        role = message.role if isinstance(message, RoleSet) else Role.COLOCATED if known is None else known.role
        switched = Switched(message.incarnation, role, now_ms)
        return msgspec.structs.replace(state, switched={**state.switched, message.worker: switched})

    def _warming(self, state: State, worker: str, since_ms: int) -> bool:
        """Whether a sample that began at `since_ms` holds warm-up."""
        switched = state.switched.get(worker)
        return switched is not None and since_ms < switched.at_ms + self.config.warm_up_ms

    def _counted(self, state: State, worker: str, last: Sums, new: Sums) -> StepSums:
        """The step with what one worker did between two heartbeats. Sums that went backwards say nothing."""
        step = state.step
        iterations, batch_sum = new.iterations - last.iterations, new.batch_sum - last.batch_sum
        decoded, prefilled = new.decoded - last.decoded, new.prefill_tokens - last.prefill_tokens
        decode_s = new.decode_s - last.decode_s
        if min(iterations, batch_sum, decoded, prefilled) < 0 or decode_s < 0:
            return step
        switched = state.switched.get(worker)
        colocated = switched is None or switched.role is Role.COLOCATED
        elapsed_ms = max(0, new.at_ms - last.at_ms) if iterations or prefilled else 0
        return msgspec.structs.replace(
            step,
            since_ms=step.since_ms or last.at_ms,
            prefilled=step.prefilled + prefilled,
            decoded=step.decoded + decoded,
            decoding_s=step.decoding_s + (decode_s * batch_sum / iterations if iterations else 0.0),
            colocated_ms=step.colocated_ms + (elapsed_ms if colocated else 0),
            disaggregated_ms=step.disaggregated_ms + (0 if colocated else elapsed_ms),
        )

    def on_request(self, state: State, message: RequestFinished, now_ms: int) -> tuple[State, Effects]:
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
            since_ms=sums.since_ms or now_ms,
            requests=sums.requests + 1,
            new_tokens=sums.new_tokens + message.new_prompt_tokens,
            generated=sums.generated + message.generated_tokens,
            retained=sums.retained + message.retained_tokens,
            engine_s=sums.engine_s + message.queue_s + message.decode_s,
            edge_decode_s=sums.edge_decode_s + message.decode_s,
            env_s=sums.env_s + message.env_s,
        )
        trajectory = message.request.partition("/")[0]
        sample = state.sample.with_turn(
            trajectory, message.turn, message.new_prompt_tokens, message.generated_tokens, message.env_s
        )
        return msgspec.structs.replace(state, step=step, sample=sample), ()

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
            return msgspec.structs.replace(state, sample=state.sample.without(message.trajectory)), ()
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
        sample = state.sample.with_end(message.trajectory, message.turns)
        return msgspec.structs.replace(state, step=step, sample=sample), ()

    def on_step(self, state: State, message: StepFinished, now_ms: int) -> tuple[State, Effects]:
        """A train step ended: refit, emit, begin anew."""
        if wrong := wrong_batch(message.batch, self.config.train_steps):
            return state, (Refuse(wrong),)
        if state.profile is not None and message.batch <= state.profile.train_step:
            return state, ()
        # Two train steps in quick succession leave the second with a handful of turns, told in part by heartbeats yet to
        # come: their sums go on into the next step, and the averages stay.
        scarce = state.measured and state.step.trajectories < self.config.least_share * self.config.cold_start.B
        seen = msgspec.structs.replace(state, step=StepSums()) if scarce else state
        profile = self._refit(seen, message.batch, now_ms)
        keep = 1 - self.config.new_share
        state = msgspec.structs.replace(
            state,
            step=state.step if scarce else StepSums(),
            decode=state.decode.decayed(keep),
            prefill_tokens=state.prefill_tokens * keep,
            prefill_s=state.prefill_s * keep,
            alone_tokens=state.alone_tokens * keep,
            alone_s=state.alone_s * keep,
            profile=profile,
            measured=state.measured or profile.samples > 0,
            sample=state.sample.aged(),
        )
        text = (
            f"after step {profile.train_step}: S={profile.S:.1f} r={profile.r:.1f} dL={profile.dL:.1f} "
            f"theta={profile.theta:.2f} T_over={profile.T_over_s * 1e3:.0f} ms A={profile.A_s * 1e3:.2f} ms b={profile.b_s * 1e3:.3f} ms "
            f"t_prefill={profile.t_prefill_s * 1e6:.0f} us ({profile.samples} turns)"
        )
        return state, (Send(profile), Note("profile", text))

    def _is_stranger(self, worker: str) -> bool:
        return self.config.workers is not None and worker not in self.config.workers

    def _refit(self, state: State, train_step: int, now_ms: int) -> WorkloadProfile:
        sums, before = state.step, state.profile
        base = self.config.cold_start if before is None else before

        def moved(name: str, new: float) -> float:
            return average(float(getattr(base, name)) if state.measured else None, new, self.config.new_share)

        changes: dict[str, float] = {}
        if sums.requests:
            seen = sums.prefilled + sums.decoded > 0  # workers were heard
            changes["r"] = moved("r", (sums.decoded if seen else sums.generated) / sums.requests)
            changes["dL"] = moved("dL", (sums.prefilled if seen else sums.new_tokens) / sums.requests)
            changes["retained"] = moved("retained", sums.retained / sums.requests)
            decoding_s = sums.decoding_s or sums.edge_decode_s
            if decoding_s > 0:
                changes["theta"] = moved("theta", sums.env_s / decoding_s)
        if sums.trajectories:
            changes["S"] = moved("S", float(sums.longest_turns))
            changes["T_env_s"] = moved("T_env_s", sums.longest_env_s)
            if sums.requests:
                tokens = sums.turns / sums.trajectories * (sums.generated + sums.new_tokens) / sums.requests
                changes["kv_bytes_per_trajectory"] = moved("kv_bytes_per_trajectory", tokens * base.kv_bytes_per_token)
        changes["A_s"], changes["b_s"] = state.decode.fit(base.A_s, base.b_s)
        if state.prefill_tokens > 0:
            changes["t_prefill_s"] = state.prefill_s / state.prefill_tokens
        elif state.alone_tokens > 0:
            each_s = state.alone_s / state.alone_tokens
            prompt = changes.get("dL", base.dL)
            fixed_s = changes["A_s"] / prompt if self.config.fused and prompt > 0 else 0.0
            changes["t_prefill_s"] = max(each_s - fixed_s, LEAST_PREFILL_SHARE * each_s)
        profile = msgspec.structs.replace(
            base,
            train_step=train_step,
            samples=sums.requests,
            costs=dict(sorted(state.costs.items())),
            sample=state.sample.complete,
            **changes,
        )
        over_s = _overhead(profile, sums, now_ms)
        return profile if over_s is None else msgspec.structs.replace(profile, T_over_s=moved("T_over_s", over_s))


def _overhead(profile: WorkloadProfile, sums: StepSums, now_ms: int) -> float | None:
    """T_over of eq. 1: seconds a turn beyond its prefill and decode terms, at the load there was. None: not measurable."""
    elapsed_s = (now_ms - sums.since_ms) / 1000
    if not sums.requests or not sums.colocated_ms or sums.disaggregated_ms or elapsed_s <= 0:
        return None
    workers = sums.colocated_ms / 1000 / elapsed_s
    each = sums.engine_s / elapsed_s / workers  # B / N, by Little's law: what was really there
    turn_s = sums.engine_s / sums.requests
    prefill_s = each * sums.prefilled / sums.requests * profile.t_prefill_s
    decode_s = sums.decoded / sums.requests * (profile.A_s + profile.b_s * each)
    return max(0.0, turn_s - prefill_s - decode_s)


def _sampled(state: State, last: Sums, new: Sums, *, alone: bool) -> State:
    """With the speeds between two heartbeats of one incarnation. Sums that went backwards are a new baseline only."""
    iterations, decode_s = new.iterations - last.iterations, new.decode_s - last.decode_s
    batch_sum = new.batch_sum - last.batch_sum
    tokens, prefill_s = new.prefill_tokens - last.prefill_tokens, new.prefill_s - last.prefill_s
    if min(iterations, batch_sum, tokens) < 0 or min(decode_s, prefill_s) < 0:
        return state
    decode = state.decode
    if iterations > 0:
        decode = decode.add(batch_sum / iterations, decode_s / iterations, float(iterations))
    if alone:
        return msgspec.structs.replace(
            state, decode=decode, alone_tokens=state.alone_tokens + tokens, alone_s=state.alone_s + prefill_s
        )
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
