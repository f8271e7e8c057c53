"""An agent loop that knows nothing of PEARL but a URL, trained by it: sessions over HTTP, the official OpenAI client.

    pearl up -c examples/http_harness/job.toml
    python examples/http_harness/harness.py http://127.0.0.1:8000

Each episode opens a session (which takes a task from the job), plays it through the session's key as any OpenAI client would,
and posts the reward. What it plays is its own business: here, the number guessing game of the demo.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import openai

from services.environments.guess_number import GuessNumber

MODEL = "tiny"
TURNS = 4


async def episode(gateway: openai.AsyncOpenAI) -> float:
    """One session, from its task to its reward. Raises openai.RateLimitError while there is no task."""
    session: Any = await gateway.post("/sessions", body={"wait_s": 5}, cast_to=object)
    agent = gateway.with_options(api_key=session["key"])  # all that an agent needs to be given
    try:
        reward, status = await play(agent, session["task"]["task_seed"])
    except openai.APIError:
        await gateway.delete(f"/sessions/{session['id']}", cast_to=object)  # its task is tried again
        raise
    await gateway.post(f"/sessions/{session['id']}/reward", body={"reward": reward, "status": status}, cast_to=object)
    return reward


async def play(agent: openai.AsyncOpenAI, task_seed: int) -> tuple[float, str]:
    """The agent loop: environment and model in turn. The task follows from the seed, which a group's sessions share."""
    environment = GuessNumber()
    messages: list[Any] = [{"role": "user", "content": await environment.reset(task_seed)}]
    reward = 0.0
    for _ in range(TURNS):
        answer = await agent.chat.completions.create(model=MODEL, messages=messages)
        action = answer.choices[0].message.content or ""
        result = await environment.step(action)
        reward += result.reward
        if result.done:
            return reward, "completed"
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": result.observation}]
    return reward, "truncated"


async def keep_playing(gateway: openai.AsyncOpenAI, ended: list[float]) -> None:
    """One episode after another, whatever becomes of the gateway."""
    while True:
        try:
            ended.append(await episode(gateway))
        except openai.APIError as error:  # no task now, or the gateway is restarting
            if not isinstance(error, openai.RateLimitError):
                print(f"an episode was lost: {error}")
            await asyncio.sleep(0.5)


async def main() -> None:
    """Play until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the gateway, e.g. http://127.0.0.1:8000")
    parser.add_argument("--key", default="none", help="an API key of the gateway, if it asks for one")
    parser.add_argument("--concurrency", type=int, default=32, help="episodes at once")
    arguments = parser.parse_args()
    gateway = openai.AsyncOpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.key, max_retries=0)
    ended: list[float] = []
    playing = [asyncio.create_task(keep_playing(gateway, ended)) for _ in range(arguments.concurrency)]
    told = 0
    while all(not task.done() for task in playing):
        await asyncio.sleep(5)
        if len(ended) > told:
            print(f"{len(ended)} episodes, mean reward of the last {len(ended) - told}: ", end="")
            print(f"{sum(ended[told:]) / (len(ended) - told):.3f}")
            told = len(ended)


if __name__ == "__main__":
    asyncio.run(main())
