"""Gymnasium environments with text, or what can be said as text, as an environment of PEARL's own agents.

    [environment]
    entry = "services.environments.gymnasium_text:GymnasiumText"
    options = { id = "FrozenLake-v1", observe = "render", actions = ["left", "down", "right", "up"],
                make = { render_mode = "ansi", is_slippery = false }, instructions = "Reach G ..." }

An environment that is registered nowhere is given as `entry = "module:callable"` instead of `id`: whatever it returns needs `reset`
and `step` as Gymnasium has them (or the older `step` of four values, or `reset` of one).

Episodes are replayed after the death of their agent: the environment must follow from its seed and actions. One that does not
(it asks the network, it keeps time) says `replayable = false`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, cast

from services.environments.base import StepResult
from services.jobfile import ConfigError

SEEDS: Final = 2**31
"""Gymnasium's seeds are below this in every environment that uses NumPy's."""
OBSERVE: Final = ("observation", "render")


class GymnasiumText:
    """One environment, `make`d at the first reset. Raises ConfigError from the constructor.

    `observe`: what the policy is told, the observation or what `render()` returns. `actions`: names of a discrete action space;
    the last of them in a reply is meant. Without names, a discrete action is the last integer in a reply, and any other action
    the reply itself. `pattern`: a regular expression whose first group in a reply is taken instead of all of it. A reply without
    an action costs `invalid_reward`, and is answered with what actions there are; the environment does not see it.
    """

    replayable: ClassVar[bool] = True

    def __init__(
        self,
        id: str = "",
        entry: str = "",
        make: Mapping[str, object] | None = None,
        modules: Sequence[str] = (),
        observe: str = "observation",
        actions: Sequence[str] = (),
        pattern: str = "",
        instructions: str = "",
        invalid_reward: float = 0.0,
        replayable: bool = True,
    ) -> None:
        where = "environment.options"
        if bool(id) == bool(entry):
            raise ConfigError(f'{where}: give either id (of a registered environment) or entry ("module:callable")')
        if observe not in OBSERVE:
            raise ConfigError(f'{where}: observe = {observe!r}; use "observation" or "render"')
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{where}: pattern = {pattern!r}: {error}") from error
        if pattern and self._pattern.groups < 1:
            raise ConfigError(f"{where}: pattern = {pattern!r} has no group: put the action in parentheses")
        self._make = _maker(id, entry, modules)
        self._kwargs = dict(make or {})
        self._render = observe == "render"
        self._actions = [name.lower() for name in actions]
        self._instructions = instructions
        self._invalid_reward = invalid_reward
        self._environment: Any = None  # what the user made
        self._over = False
        self.__dict__["replayable"] = replayable  # an instance's own; the class's is the default

    async def reset(self, task_seed: int) -> str:
        """The instructions and the first observation of the episode with this seed."""
        first = await asyncio.to_thread(self._reset, task_seed % SEEDS)
        return f"{self._instructions}\n\n{first}" if self._instructions else first

    def _reset(self, seed: int) -> str:
        if self._environment is None:
            self._environment = self._make(**self._kwargs)
        self._over = False
        found = cast(object, self._environment.reset(seed=seed))
        if isinstance(found, tuple):
            pair = cast("tuple[object, ...]", found)
            found = pair[0] if len(pair) == 2 else pair
        return self._text(found)

    async def step(self, action: str) -> StepResult:
        """Act, if the reply holds an action."""
        assert not self._over, "the episode is over"
        return await asyncio.to_thread(self._step, action)

    def _step(self, reply: str) -> StepResult:
        action = self._action(reply)
        if action is None:
            return StepResult(observation=self._hint(), reward=self._invalid_reward)
        found = cast("tuple[Any, ...]", self._environment.step(action))
        if len(found) == 4:  # Gym before 0.26
            observation, reward, terminated, truncated = found[0], found[1], found[2], False
        else:
            observation, reward, terminated, truncated = found[:4]
        self._over = bool(terminated or truncated)
        return StepResult(
            observation=self._text(observation),
            reward=float(reward),
            done=self._over,
            truncated=bool(truncated and not terminated),
        )

    async def close(self) -> None:
        """Close what was made."""
        if self._environment is not None and hasattr(self._environment, "close"):
            await asyncio.to_thread(self._environment.close)

    def _text(self, observation: object) -> str:
        return str(self._environment.render() if self._render else observation)

    def _action(self, reply: str) -> object | None:
        """What is given to the environment; None for a reply without an action."""
        if self._pattern.pattern:
            match = self._pattern.search(reply)
            if match is None:
                return None
            reply = match[1] or ""
        count = _discrete(self._environment)
        if self._actions:
            words = re.findall("|".join(rf"\b{re.escape(name)}\b" for name in self._actions), reply.lower())
            return self._first(count) + self._actions.index(words[-1]) if words else None
        if count is None:
            return reply.strip()
        numbers = re.findall(r"-?\d+", reply)
        action = int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else -1
        first = self._first(count)
        return action if first <= action < first + count else None

    def _first(self, count: int | None) -> int:
        return 0 if count is None else int(getattr(self._environment.action_space, "start", 0))

    def _hint(self) -> str:
        if self._actions:
            return f"No action was found in the reply. Actions: {', '.join(self._actions)}."
        count = _discrete(self._environment)
        if count is None:
            return "No action was found in the reply."
        first = self._first(count)
        return f"No action was found in the reply. Actions: {first} to {first + count - 1}."


def _discrete(environment: Any) -> int | None:
    """How many actions there are, where they are numbers."""
    count = getattr(getattr(environment, "action_space", None), "n", None)
    return None if count is None else int(count)


def _maker(id: str, entry: str, modules: Sequence[str]) -> Callable[..., object]:
    """What makes an environment. Raises ConfigError."""
    where = "environment.options"
    try:
        for module in modules:  # those that register environments
            importlib.import_module(module)
        if entry:
            source, colon, name = entry.partition(":")
            if not colon:
                raise ConfigError(f'{where}: entry = {entry!r}: write "module:callable"')
            found = getattr(importlib.import_module(source), name, None)
            if not callable(found):
                raise ConfigError(f"{where}: entry = {entry!r}: {source} has no callable {name}")
            return found
    except ImportError as error:
        raise ConfigError(f"{where}: {error}; install it in PEARL's environment") from error
    try:
        gymnasium: Any = importlib.import_module("gymnasium")
    except ImportError as error:
        raise ConfigError(f"{where}: id = {id!r} needs Gymnasium ({error}): pip install 'pearl-rl[gym]'") from error
    try:
        gymnasium.spec(id)
    except gymnasium.error.Error as error:
        raise ConfigError(f"{where}: id = {id!r}: {error}") from error
    return functools.partial(cast("Callable[..., object]", gymnasium.make), id)
