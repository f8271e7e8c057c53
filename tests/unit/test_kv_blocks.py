"""Bookkeeping of the KV cache's blocks: nothing is lost, shared or found wrongly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from messages.ids import PolicyVersion
from services.rollout_worker.engines.base import GenerateSpec
from services.rollout_worker.engines.batching import Batcher, Reply
from services.rollout_worker.engines.kv_cache import BLOCK, ROOT, BlockPool


def store(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Compute and publish a context of whole blocks; the blocks stay in use."""
    blocks = pool.allocate(len(tokens) // BLOCK)
    assert blocks is not None
    link = ROOT
    for index, block in enumerate(blocks):
        link = pool.publish(block, link, tuple(tokens[index * BLOCK : (index + 1) * BLOCK]))
    return blocks


def test_a_context_is_found_as_far_as_it_agrees():
    pool = BlockPool(20)
    tokens = list(range(4 * BLOCK))
    blocks = store(pool, tokens)
    assert pool.match(tokens, 4)[0] == blocks
    other = [*tokens[: 2 * BLOCK], 99, *tokens[2 * BLOCK + 1 :]]
    assert pool.match(other, 4)[0] == blocks[:2]
    assert pool.match(tokens[BLOCK:], 3)[0] == []  # equal tokens in another place are another context


def test_the_least_recently_used_end_goes_first():
    pool = BlockPool(5)
    old, new = [0] * 2 * BLOCK, [1] * 2 * BLOCK
    pool.release(store(pool, old))
    pool.release(store(pool, new))
    assert pool.allocate(1) is not None
    assert len(pool.match(old, 2)[0]) == 1
    assert len(pool.match(new, 2)[0]) == 2


def test_flushed_blocks_are_not_found_but_stay_in_use():
    pool = BlockPool(5)
    used = store(pool, [0] * BLOCK)
    pool.release(store(pool, [1] * BLOCK))
    pool.flush()
    assert pool.match([0] * BLOCK, 1)[0] == pool.match([1] * BLOCK, 1)[0] == []
    assert pool.available == 3
    pool.release(used)
    assert pool.available == 4


def test_equal_contexts_computed_twice_share_a_link():
    pool = BlockPool(5)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first and second
    tokens = (3,) * BLOCK
    assert pool.publish(first[0], ROOT, tokens) == pool.publish(second[0], ROOT, tokens)
    pool.release(first)
    pool.release(second)
    assert pool.available == 4


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(4, 12),
    st.integers(1, 4),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_every_request_finishes_and_every_block_comes_back(
    wanted: list[tuple[int, int, int]], blocks: int, most: int, swaps: list[int]
):
    """Prompts of (length, reply length, content) through a small cache, with weight swaps between iterations."""
    pool = BlockPool(blocks + 1)
    batcher = Batcher(pool, max_running=most, chunk_tokens=20, context_limit=10_000)
    for number, (length, reply, content) in enumerate(wanted):
        spec = GenerateSpec(
            request=str(number), attempt=1, prompt=[content] * min(length, batcher.context_limit - 1), prefix=[],
            max_new_tokens=reply + 1, temperature=0.0, seed=0, stop_ids=[],
        )  # fmt: skip
        batcher.waiting.append(Reply(spec, number))
    ended = 0

    def draw(reply: Reply) -> int:
        reply.tokens.append(number_of(reply))
        if reply.index >= reply.spec.max_new_tokens or len(reply.tokens) >= batcher.context_limit:
            batcher.end(reply)
            return 1
        return 0

    for iteration in range(2000):
        if not batcher.busy:
            break
        if iteration in swaps:
            batcher.new_weights()
        chunk = batcher.next_prefill()
        assert not chunk or len(chunk) * max(count for _, count in chunk) <= 20
        for reply, count in chunk:
            assert len(reply.blocks) * BLOCK >= reply.computed + count
            batcher.advance(reply, count)
        for reply, _ in chunk:
            if reply.computed == len(reply.tokens):
                ended += draw(reply)
        for reply in batcher.next_decode():
            assert len(reply.blocks) * BLOCK > reply.computed
            batcher.advance(reply, 1)
            ended += draw(reply)
        assert len(batcher.running) <= most
    assert ended == len(wanted)
    assert pool.available == pool.capacity


def number_of(reply: Reply) -> int:
    return len(reply.tokens) % 7


def test_a_fresh_reply_has_sent_its_prefix():
    spec = GenerateSpec(
        request="r", attempt=2, prompt=[1, 2], prefix=[3], max_new_tokens=5, temperature=0.0, seed=0, stop_ids=[]
    )
    reply = Reply(spec, 1)
    assert (reply.index, reply.sent, reply.version) == (1, 3, PolicyVersion(-1))
