"""Results made up for tests of reports: right in form, and numbers that can be checked by hand."""

from __future__ import annotations

from services.simulator.whatif.result import Budget, Decided, Oracle, PolicyResult, Result, Span, Step


def step(batch: int, start_s: float, end_s: float, tokens: int) -> Step:
    return Step(
        batch=batch,
        start_s=start_s,
        end_s=end_s,
        rollout_tokens=tokens // 4,
        trained_tokens=tokens - tokens // 4,
        train_s=60.0,
        wait_s=(end_s - start_s) - 60.0,
        staleness=1,
        toggled=False,
        reward=0.5,
    )


def policy(rate: float, decided: tuple[Decided, ...] = (), gpus: int = 4) -> PolicyResult:
    steps = tuple(step(index, 600.0 * index, 600.0 * (index + 1), int(600 * rate)) for index in range(12))
    spans = tuple(
        Span(f"n{gpu // 2}/{gpu % 2}", 1800.0 * part, 1800.0 * (part + 1), use)
        for gpu in range(gpus)
        for part, use in enumerate(("colocated", "prefill" if gpu % 2 else "decode", "training", "idle"))
    )
    return PolicyResult(
        throughput_tokens_per_s=rate,
        train_steps=12,
        mean_train_step_s=600.0,
        staleness_max=1,
        trajectories_lost=0,
        gpu_busy_fraction=0.75,
        decisions=len(decided),
        reward_mean=0.5,
        reserved_gpu_hours=8.0,
        training_gpu_hours=32.0,
        preemptible_gpu_hours=20.0,
        models="a <system> & more",
        leaves_out="nothing",
        steps=steps,
        decided=decided,
        spans=spans,
    )


DECIDED = (
    Decided(
        at_s=60.0,
        cause="gpus available",
        mode="disaggregated",
        prefill=3,
        decode=5,
        colocated=0,
        borrow=True,
        reason="best ratio",
        predicted_s=80.0,
        incumbent_s=100.0,
        realised_s=90.0,
    ),
    Decided(
        at_s=900.0,
        cause="training begins",
        mode="colocated",
        prefill=0,
        decode=0,
        colocated=4,
        borrow=False,
        reason="forced",
    ),
)


def result(seed: int = 0, shift: float = 0.0, trace: str = "bamboo-segment1") -> Result:
    return Result(
        trace=trace,
        workload="swebench-mini",
        hardware="h800-qwen3-8b",
        hours=2.0,
        seed=seed,
        settings={"batch_trajectories": 64, "staleness": 1, "train_s": 163.8, "router": "prefix affinity"},
        budget=(Budget(0.0, 4, 8, 16), Budget(3000.0, 4, 2, 16), Budget(5000.0, 4, 12, 16)),
        policies={
            "roll": policy(1000.0 + shift),
            "rlboost": policy(2000.0 + shift),
            "pearl": policy(2500.0 + shift, DECIDED, gpus=8),
        },
        oracle=Oracle(throughput_tokens_per_s=3000.0),
        oracles=(
            Oracle(throughput_tokens_per_s=3000.0),
            Oracle(name="batch-synchronous", throughput_tokens_per_s=2600.0),
        ),
        wall_s=1.5,
    )
