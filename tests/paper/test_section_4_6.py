"""Section 4.6 of the paper: what the Intra-Scale Toggle Manager promises, one test a claim.

Eq. 7, the gate, is the decision engine's here: see test_section_4_2_4_3.py.
"""

from __future__ import annotations

import pytest

from messages.envelope import Message
from messages.ids import Residency, WorkerId
from messages.node_agent import Kill, Launch
from messages.rollout_worker import Activate, Deactivate, Drain
from messages.trainer import TrainerRelease, TrainerResume
from pearl_state.model import Pair, Row
from services.toggle_manager.config import Config
from services.toggle_manager.core import ToggleManagerCore
from tests.unit.executing import (
    JOB,
    Driver,
    activated,
    applied,
    assign,
    drained,
    draining,
    inactive,
    launching,
    leave,
    named,
    of,
    plan,
    published,
    ready,
    released,
    role_set,
    row,
)
from tests.unit.test_toggle_manager import finished, free


@pytest.fixture
def driver() -> Driver:
    driver = Driver(ToggleManagerCore(Config.of(JOB)))
    driver.say(published(0))
    return driver


def lend(driver: Driver, name: str, generation: int, first: bool) -> list[Message]:
    """Borrow t0-w0 and admit it under `generation`."""
    group = (assign("t0-w0", generation=generation),)
    joining = launching("t0-w0", generation=generation - 1)
    sent = driver.table(joining, plan=plan(name, add=group))
    (release,) = of(TrainerRelease, sent)
    sent += driver.say(free(release.epoch), *((ready("t0-w0"),) if first else ()), activated("t0-w0", generation))
    sent += driver.say(applied("t0-w0", 0))
    sent += driver.table(joining, plan=plan(name, "applying", add=group))
    sent += driver.say(role_set("t0-w0", generation))
    return sent + driver.table(row("t0-w0", generation=generation))


def give_back(driver: Driver, name: str, generation: int, batch: int) -> list[Message]:
    """Return t0-w0 under the cut epoch's `generation`, and train `batch`."""
    sent = driver.table(draining("t0-w0", generation), plan=plan(name, "applying", remove=(leave("t0-w0"),)))
    sent += driver.say(drained("t0-w0", generation), released("t0-w0", generation))
    sent += driver.table(inactive("t0-w0", generation=generation), training_batch=batch)
    sent += driver.say(finished(batch))
    return sent + driver.table(inactive("t0-w0", generation=generation))


def test_processes_are_retained_across_hand_overs(driver: Driver) -> None:
    """ "It retains training and rollout processes across handoffs": one launch for any number of windows, no kill."""
    sent = lend(driver, "p1", 1, first=True) + give_back(driver, "p2", 2, 0)
    sent += lend(driver, "p3", 3, first=False) + give_back(driver, "p4", 4, 1)
    sent += lend(driver, "p5", 5, first=False)
    assert named(sent, Launch, Kill) == [("Launch", "t0-w0")]
    assert len(of(Activate, sent)) == 3 and len(of(Deactivate, sent)) == 2


def test_training_releases_before_rollout_takes(driver: Driver) -> None:
    """ "Training releases GPU memory when borrowing begins": nothing of rollout's before the release is confirmed."""
    sent = driver.table(launching("t0-w0", generation=0), plan=plan(add=(assign("t0-w0"),)))
    sent += driver.wait(5_000)
    assert {type(message) for message in sent} == {TrainerRelease}


def test_overlap_workers_drain_before_returning(driver: Driver) -> None:
    """ "Overlap workers drain before returning"."""
    lend(driver, "p1", 1, first=True)
    sent = driver.table(draining("t0-w0", 2), plan=plan("p2", "applying", remove=(leave("t0-w0"),)))
    assert named(sent, Drain, Deactivate) == [("Drain", "t0-w0")]
    assert named(driver.say(drained("t0-w0", 2)), Drain, Deactivate) == [("Deactivate", "t0-w0")]


def test_training_cannot_proceed_until_borrowed_gpus_are_released(driver: Driver) -> None:
    """ "Returning is mandatory because training cannot proceed until borrowed GPUs are released"."""
    lend(driver, "p1", 1, first=True)
    both = (Pair(overlap=WorkerId("t0-w0"), training=WorkerId("t0-t0"), residency=Residency.DRAINING),)
    leaving = plan("p2", "applying", remove=(leave("t0-w0"),))
    sent = driver.table(draining("t0-w0", 2), plan=leaving, training_batch=0, pairs=both)
    sent += driver.say(drained("t0-w0", 2)) + driver.wait(500)
    assert not of(TrainerResume, sent)
    driver.say(released("t0-w0", 2))
    assert of(TrainerResume, driver.table(inactive("t0-w0", generation=2), training_batch=0))


def test_rollout_on_dedicated_gpus_continues_uninterrupted(driver: Driver) -> None:
    """ "Rollout on dedicated GPUs continues uninterrupted": no dedicated worker hears anything, whatever is handed over."""
    dedicated: tuple[Row, ...] = (row("r0-w0"), row("p0-w0"))
    sent = driver.table(*dedicated, launching("t0-w0", generation=0), plan=plan(add=(assign("t0-w0"),)))
    sent += driver.table(*dedicated, inactive("t0-w0", generation=0), training_batch=0)
    assert {getattr(message, "worker", "t0-w0") for message in sent} <= {"t0-w0"}


def test_the_cost_of_a_toggle_is_learned_online(driver: Driver) -> None:
    """Section 5: moving averages "for toggle-enabled and toggle-disabled steps estimate switching costs online"."""
    driver.say(finished(0))
    driver.now_ms += 8_000
    driver.say(finished(1))
    lend(driver, "p1", 1, first=True)
    driver.now_ms += 5_000
    give_back(driver, "p2", 2, 2)
    assert (driver.state.costs.plain_step_s, driver.state.costs.toggled_step_s) == (8.0, 5.0)
