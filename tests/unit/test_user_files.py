"""Traces and workloads that users bring: written in any way that people and programs write CSV, read as meant or refused by line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.environments import workload
from services.environments.workload import WorkloadError
from services.preemption_feed import traces
from services.preemption_feed.traces import Step, TraceError


class Writing:
    """One way of writing a table down."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.separator = self.draw.choice(",,;\t|")
        self.newline = self.draw.choice(("\n", "\r\n", "\r"))

    def number(self, value: float) -> str:
        forms = [f"{value}", f"{value:.3f}", f" {value} ", f"{value:.6e}"]
        if value == int(value):
            forms += [f"{int(value)}", f"+{int(value)}", f"{int(value)}.0", f"{int(value)}."]
        return self.draw.choice(forms)

    def cell(self, text: str) -> str:
        return f'"{text}"' if self.draw.random() < 0.2 else text

    def table(self, columns: list[str], rows: list[list[str]]) -> tuple[str, list[int]]:
        """The file's text, and the line of each row."""
        order = [*range(len(columns)), None]
        self.draw.shuffle(order)
        lines: list[str] = []

        def put(cells: list[str]) -> int:
            while self.draw.random() < 0.2:
                lines.append(self.draw.choice(("", "  ", '# "noted', "#", "\t" if self.separator != "\t" else "")))
            texts = [self.cell(self.draw.choice(("", "n/a", "eu-1a"))) if at is None else cells[at] for at in order]
            lines.append(self.separator.join(texts))
            return len(lines)

        named = [self.draw.choice((each, each.upper(), f" {each} ")) for each in columns]
        header = ["zone" if at is None else self.cell(named[at]) for at in order]
        lines.append(self.separator.join(header))
        at = [put([self.cell(cell) for cell in row]) for row in rows]
        text = self.newline.join(lines) + self.draw.choice(("", self.newline, self.newline * 2))
        return self.draw.choice(("", "\ufeff")) + text, at


times = st.floats(0, 1e6, allow_nan=False).map(lambda value: round(value, 3))
counts = st.dictionaries(times, st.integers(0, 5000), min_size=1, max_size=12)
seeds = st.integers(0, 10**9)


def as_steps(at: dict[float, int]) -> tuple[Step, ...]:
    found: list[Step] = []
    for time_s in sorted(at):
        if not found or found[-1].gpus != at[time_s]:
            found.append(Step(time_s, at[time_s]))
    return tuple(found)


@settings(max_examples=150, deadline=None)
@given(counts, seeds)
def test_counts_are_read_however_they_are_written(at: dict[float, int], seed: int) -> None:
    writing = Writing(seed)
    rows = [[writing.number(time_s), writing.number(gpus)] for time_s, gpus in at.items()]
    writing.draw.shuffle(rows)
    text, _ = writing.table(["time_s", "available_gpus"], rows)
    found = traces.parse(text, "t.csv")
    expected = as_steps({round(time_s, 3): gpus for time_s, gpus in at.items()})
    assert [step.gpus for step in found.steps] == [step.gpus for step in expected]
    assert [step.time_s for step in found.steps] == pytest.approx(
        [step.time_s for step in expected], rel=1e-6, abs=1e-3
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=25), seeds)
def test_events_are_counted_however_they_are_written(moves: list[tuple[int, int]], seed: int) -> None:
    """Instances come and go; what is there at each time is what the counts then say."""
    writing = Writing(seed)
    there: dict[int, int] = {}
    rows: list[list[str]] = []
    at: dict[float, int] = {}
    for time_s, instance in sorted(moves, key=lambda move: move[0]):
        if instance in there:
            gpus = there.pop(instance)
            size = writing.draw.choice(("", "0", str(gpus)))
            rows.append([str(time_s), "remove", f"i-{instance}", size])
        else:
            there[instance] = writing.draw.randint(1, 8)
            rows.append([str(time_s), writing.draw.choice(("add", "ADD")), f"i-{instance}", str(there[instance])])
        at[time_s] = sum(there.values())
    if writing.draw.random() < 0.5 and len(at) > 1:
        rows.reverse()  # some tools write the newest first
    text, _ = writing.table(["time_s", "event", "instance_id", "gpus"], rows)
    assert traces.parse(text, "t.csv").steps == as_steps(at)


BAD = ("-1", "nan", "inf", "-inf", "1e99", "1_000", "0x10", "1,5", "1 000", "ten", "1e", "--1", "1e400", "٣", "1\n2")


@settings(max_examples=150, deadline=None)
@given(counts, seeds, st.sampled_from(BAD), st.booleans())
def test_a_bad_cell_is_refused_with_its_line(at: dict[float, int], seed: int, bad: str, in_time: bool) -> None:
    writing = Writing(seed)
    rows = [[writing.number(time_s), writing.number(gpus)] for time_s, gpus in at.items()]
    victim = writing.draw.randrange(len(rows))
    rows[victim][0 if in_time else 1] = bad
    if any(each in bad for each in ",\n"):
        writing.cell = lambda text: f'"{text}"'  # else it would be two cells, or two rows
    text, lines = writing.table(["time_s", "available_gpus"], rows)
    with pytest.raises(TraceError) as caught:
        traces.parse(text, "t.csv")
    assert str(caught.value).startswith(f"t.csv: line {lines[victim]}: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0,4\n5,6\n", "line 1: numbers where a header"),
        ("time_s available_gpus\n0 4\n", "line 1: columns"),
        ("time_s,available_gpus\n0,4\n1,000,6\n", "line 3: 3 cells where the header has 2"),
        ("time_s;available_gpus\n0,5;4\n", "line 2: time_s '0,5' is not a number"),
        ("time_s,available_gpus,available_gpus\n0,4,4\n", "line 1: column 'available_gpus' is there twice"),
        ('time_s,available_gpus,note\n0,4,"open\n1,5,x\n', "line 2: unexpected end of data; is a quote not closed?"),
        ('time_s,available_gpus\n0,"4"5\n', "line 2"),
        ("time_s,available_gpus\n0,4\ntime_s,available_gpus\n", "line 3: time_s 'time_s' is not a number"),
        ("time_s,available_gpus\n1.7e9,4\n", "count from the trace's beginning"),
        ("time_s,event,instance_id,gpus\n0,add,a,4\n1,add,a,8\n", "line 3: adds 8 GPUs of 'a', which is there with 4"),
        ("time_s,event,instance_id,gpus\n0,add,a,4\n1,remove,a,2\n", "line 3: removes 2 GPUs of 'a', which has 4"),
        ("\x00\n", "line 1"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(text: str, reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        traces.parse(text, "t.csv")
    assert reason in str(caught.value)


def test_a_spreadsheets_first_line_names_the_separator() -> None:
    assert traces.parse("sep=;\ntime_s;available_gpus\n0;4\n").steps == (Step(0.0, 4),)


def test_what_was_read_over_is_told() -> None:
    trace = traces.parse("time_s,available_gpus\n5,4\n5,6\n9,\n")
    assert trace.steps == (Step(5.0, 6),)
    assert trace.warnings == (
        "line 3: time_s 5 is there twice, this row counts",
        "line 4: a gap, the value before it holds",
        "begins at 5 s: until then no GPU is there",
    )


def test_files_that_are_no_text(tmp_path: Path) -> None:
    utf16 = tmp_path / "utf16.csv"
    utf16.write_text("time_s,available_gpus\n0,4\n", encoding="utf-16")
    for path in (utf16, tmp_path, tmp_path / "none.csv", "nul\0.csv", "x" * 5000):
        with pytest.raises(TraceError, match=r"csv|folder|directory|read|UTF-8"):
            traces.load(str(path))
        with pytest.raises(WorkloadError):
            workload.load(str(path))


turn = st.tuples(st.integers(1, 90_000), st.integers(0, 4000), st.floats(0, 900).map(lambda value: round(value, 3)))
trajectories = st.lists(st.lists(turn, min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(trajectories, seeds)
def test_workloads_are_read_however_they_are_written(recorded: list[list[tuple[int, int, float]]], seed: int) -> None:
    writing = Writing(seed)
    rows: list[list[str]] = []
    for trajectory, turns in enumerate(recorded):
        for number, (prompt, reply, delay) in enumerate(turns, start=writing.draw.choice((0, 1))):
            reward = str(trajectory / 2) if number == len(turns) - 1 or len(turns) == 1 else ""
            rows.append([f"t{trajectory}", str(number), f"{prompt}", f"{reply}", f"{delay:.3f}", reward])
    writing.draw.shuffle(rows)
    text, _ = writing.table([*workload.COLUMNS, "reward"], rows)
    found = {each.name: each for each in workload.parse(text).trajectories}
    assert len(found) == len(recorded)
    for trajectory, turns in enumerate(recorded):
        one = found[f"t{trajectory}"]
        assert [(each.prompt_tokens, each.completion_tokens, each.env_time_s) for each in one.turns] == turns


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("a,0,10,5,1,\na,2,20,5,1,\n", "line 3: turn 1 of 'a' is missing"),
        ("a,0,10,5,1,\na,0,20,5,1,\n", "line 3: turn 0 of 'a' is there twice (line 2, too)"),
        ("a,0,10,5,1,1\na,1,20,5,1,0\n", "line 3: reward 0 of 'a', which has 1 on another row"),
        ("a,0,0,5,1,\n", "line 2: prompt_tokens 0"),
        ("a,0,1.5,5,1,\n", "line 2: prompt_tokens 1.5 is not a whole number"),
        ("a,0,10,5,-1,\n", "line 2: env_time_s -1"),
        (",0,10,5,1,\n", "line 2: no traj"),
        ("", "line 2: no data"),
    ],
)
def test_a_workload_that_cannot_be_read_says_where_and_why(rows: str, reason: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload.parse("traj,turn,prompt_tokens,completion_tokens,env_time_s,reward\n" + rows, "w.csv")
    assert str(caught.value).startswith("w.csv: ") and reason in str(caught.value)
