"""Which requests run, and what the next iteration computes. Pure: no tensors, no threads, no clock.

Continuous batching: every iteration computes one chunk of waiting prompts (several short ones together), then one
token of every request whose context is computed. A request that runs out of KV cache makes the youngest one give its
blocks back and wait again; the oldest always fits, so all finish.

Disaggregated (paper 4.2): a decode engine admits a request as ever, but its context's KV comes from elsewhere (it is
`receiving`); a prefill engine computes contexts and no more (`prefill_only`).
"""

from __future__ import annotations

from collections import deque

from messages.ids import PolicyVersion
from services.rollout_worker.engines.base import GenerateSpec
from services.rollout_worker.engines.kv_cache import BLOCK, ROOT, BlockPool


class Reply:
    """One attempt in the engine: its context, what of it is computed, and what was not yet handed out."""

    __slots__ = (
        "blocks",
        "cached",
        "computed",
        "lease",
        "link",
        "linked",
        "logprobs",
        "prompt_len",
        "receiving",
        "remote",
        "sent",
        "sent_at",
        "sent_kv",
        "shareable",
        "spec",
        "stop_ids",
        "stream",
        "tokens",
        "version",
    )

    def __init__(self, spec: GenerateSpec, stream: int, *, remote: bool = False, sent_kv: int = 0) -> None:
        self.spec = spec
        self.stream = stream
        self.stop_ids = frozenset(spec.stop_ids)
        self.tokens = [*spec.prompt, *spec.prefix]
        self.prompt_len = len(spec.prompt)
        self.sent = len(self.tokens)  # tokens before this one are the client's already
        self.sent_at = 0.0
        self.logprobs: list[float] = []  # of tokens[sent:]
        self.version = PolicyVersion(-1)  # of tokens[sent:]
        self.cached = -1  # prompt tokens found in the cache at first admission; -1: not admitted yet
        self.computed = 0  # tokens whose KV is in the cache
        self.blocks: list[int] = []
        self.linked = 0  # blocks published or matched
        self.link = ROOT
        self.shareable = True
        self.lease = 0  # counts the times `blocks` were taken and given back: who writes into them late must know which
        self.remote = remote  # its context is computed by another engine
        self.receiving = False  # and on its way into `blocks`
        self.sent_kv = sent_kv  # in a prefill engine: tokens whose KV the receiver has, or will have

    @property
    def index(self) -> int:
        """Which token of the reply comes next, from the end of the prompt."""
        return len(self.tokens) - self.prompt_len


class Batcher:
    """`waiting` in order of arrival; `running` in order of admission, of which some still compute their context."""

    def __init__(self, pool: BlockPool, *, max_running: int, chunk_tokens: int, context_limit: int) -> None:
        self.pool = pool
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.context_limit = min(context_limit, pool.capacity * BLOCK)
        self.prefill_only = False
        self.waiting: deque[Reply] = deque()
        self.running: list[Reply] = []
        self.moves = 0  # between `waiting` and `running`
        self.arrivals: list[Reply] = []  # remote ones that now have blocks: for the engine to take, and clear
        self.dropped: list[Reply] = []  # receiving ones whose blocks were taken: likewise

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> None:
        """Give blocks to those that wait, in their order, as far as there are any."""
        while self.waiting and len(self.running) < self.max_running and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())

    def next_prefill(self) -> list[tuple[Reply, int]]:
        """Contexts to go on computing, and how many tokens of each; padded to the longest within `chunk_tokens`."""
        self.admit()
        chunk: list[tuple[Reply, int]] = []
        longest = 0
        for reply in self.running:
            if reply.receiving:
                continue
            count = min(len(reply.tokens) - reply.computed, self.chunk_tokens)
            if count == 1 and not self.prefill_only:
                continue  # one token is a decode, whoever wrote it
            if chunk and max(longest, count) * (len(chunk) + 1) > self.chunk_tokens:
                break
            longest = max(longest, count)
            chunk.append((reply, count))
        return chunk

    def next_decode(self) -> list[Reply]:
        """Requests whose next token can be computed from their last one, each with a block to put it into."""
        if self.prefill_only:
            return []
        for reply in tuple(self.running):
            if reply.blocks and not reply.receiving and reply.computed >= len(reply.blocks) * BLOCK:
                self._extend(reply)
        return [reply for reply in self.running if len(reply.tokens) - reply.computed == 1 and not reply.receiving]

    def advance(self, reply: Reply, count: int) -> None:
        """KV of `count` more tokens is stored; blocks now full become findable."""
        reply.computed += count
        while reply.shareable and (reply.linked + 1) * BLOCK <= reply.computed:
            start = reply.linked * BLOCK
            block = tuple(reply.tokens[start : start + BLOCK])
            reply.link = self.pool.publish(reply.blocks[reply.linked], reply.link, block)
            reply.linked += 1

    def end(self, reply: Reply) -> None:
        """Forget a request, wherever it is."""
        if reply in self.running:
            self.running.remove(reply)
        else:
            self.waiting.remove(reply)
        self._give_back(reply)

    def retract(self, reply: Reply) -> None:
        """Give the KV cache back; the context is computed again later, before those that wait.

        Here, even if another engine had computed it: that one has forgotten it, and only so the oldest always gets on.
        """
        if reply.receiving:
            self.dropped.append(reply)
        reply.remote = False
        self.moves += 1
        self.running.remove(reply)
        self._give_back(reply)
        self.waiting.appendleft(reply)

    def retract_all(self) -> None:
        for reply in self.running[::-1]:
            self.retract(reply)

    def new_weights(self) -> None:
        """KV of the old weights may serve the requests it was computed for, but no others."""
        self.pool.flush()
        for reply in self.running:
            reply.shareable = False

    def _admit(self, reply: Reply) -> bool:
        blocks, link = self.pool.match(reply.tokens, (len(reply.tokens) - 1) // BLOCK)
        needed = -(-len(reply.tokens) // BLOCK) - len(blocks)
        # Room for those that run to grow by one block, else the newcomer would be retracted at once.
        room = self.pool.available - (len(self.running) if self.running else 0)
        fresh = self.pool.allocate(needed) if needed <= room else None
        if fresh is None:
            self.pool.release(blocks)
            return False
        reply.blocks = blocks + fresh
        reply.linked, reply.link, reply.computed = len(blocks), link, len(blocks) * BLOCK
        reply.shareable = True
        if reply.cached < 0:
            reply.cached = reply.computed
        reply.lease += 1
        self.moves += 1
        if reply.remote:
            reply.receiving = True
            self.arrivals.append(reply)
        return True

    def _extend(self, reply: Reply) -> None:
        """One more block, if need be from the youngest; the reply itself may be that one."""
        while reply.blocks:
            fresh = self.pool.allocate(1)
            if fresh is not None:
                reply.blocks += fresh
                return
            assert self.running != [reply], "one request within the context limit must fit"
            self.retract(self.running[-1])

    def _give_back(self, reply: Reply) -> None:
        self.pool.release(reply.blocks)
        reply.blocks = []
        reply.computed = reply.linked = 0
        reply.link = ROOT
        reply.receiving = False
        reply.lease += 1
