"""A taskset and a harness written for verifiers 0.4: the policy is asked for a sum, told whether it was right, and asked again.

Imported by verifiers alone, in an environment of its own (tests/integration/test_harness_verifiers.py).
"""

import json
import urllib.request

import verifiers.v1 as vf

__all__ = ["SumsHarness", "SumsTaskset"]


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, task: SumsData, trace: vf.Trace) -> float:
        """How often the answer was given."""
        return float(sum(str(task.answer) in (message.content or "") for message in trace.assistant_messages))


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for one in range(4):
            data = SumsData(name=f"sum-{one}", prompt=f"What is {one} + {one}?", answer=2 * one)
            yield SumsTask(data, self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """Two turns of OpenAI's interface, at the endpoint that verifiers gives it."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        import asyncio

        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            body = {"model": ctx.model, "messages": messages}
            answer = await asyncio.to_thread(self._ask, endpoint, secret, body)
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": "Are you sure?"},
            ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    @staticmethod
    def _ask(endpoint, secret, body):
        headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{endpoint}/chat/completions", json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))
