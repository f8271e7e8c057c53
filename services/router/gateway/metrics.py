"""What a gateway counts, as Prometheus reads it. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Seconds, in cumulative buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """One observation."""
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """In the text format."""
        total, found = 0, [f"# TYPE {name} histogram"]
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self._counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counters of one gateway since its start."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int], int] = defaultdict(int)  # by endpoint and status
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.attempts = 0  # of finished requests; more than one each where workers drained, died or changed role
        self.interruptions = 0
        self.cancelled = 0  # the client went away
        self.first_token = Histogram()
        self.whole = Histogram()

    def text(self, gauges: Mapping[str, float]) -> str:
        """All of it; `gauges` are read now."""
        lines = ["# TYPE pearl_gateway_requests_total counter"]
        lines += [
            f'pearl_gateway_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.answers.items())
        ]
        for name in ("prompt_tokens", "completion_tokens", "attempts", "interruptions", "cancelled"):
            lines += [f"# TYPE pearl_gateway_{name}_total counter", f"pearl_gateway_{name}_total {getattr(self, name)}"]
        lines += self.first_token.lines("pearl_gateway_first_token_seconds")
        lines += self.whole.lines("pearl_gateway_request_seconds")
        for name, value in gauges.items():
            lines += [f"# TYPE pearl_gateway_{name} gauge", f"pearl_gateway_{name} {value:g}"]
        return "\n".join(lines) + "\n"
