"""The prefix cache of the timing model: against a plain set of prefixes, and its accounts."""

from __future__ import annotations

import random

import pytest

from services.timing.prefix_cache import LEAST_LEAVES, PrefixCache


def put(cache: PrefixCache, tokens: object) -> None:
    """Compute and keep a whole context."""
    node, length = cache.match(tokens, len(tokens))  # type: ignore[arg-type]
    cache.lock(node)
    assert cache.hold(len(tokens) - length)  # type: ignore[arg-type]
    cache.unlock(node)
    cache.drop(len(tokens) - length)  # type: ignore[arg-type]
    cache.store(tokens)  # type: ignore[arg-type]


def test_the_longest_known_prefix_is_found_to_the_token():
    cache = PrefixCache(1000)
    put(cache, [1, 2, 3, 4, 5])
    put(cache, [1, 2, 3, 9, 9, 9])
    assert cache.stored == 8  # the common three are kept once
    assert cache.match([1, 2, 3, 4, 7], 5)[1] == 4
    assert cache.match([1, 2, 3, 9, 9, 9, 9], 7)[1] == 6
    assert cache.match([1, 2, 3, 9, 9, 9], 5)[1] == 5  # one token is always left to compute
    assert cache.match([2], 1)[1] == 0


def test_a_range_is_a_context_of_known_length():
    cache = PrefixCache(10**9)
    for trajectory in range(50):
        base = trajectory << 32
        for turn in range(1, 40):
            context = range(base, base + 300 * turn)
            assert cache.match(context, len(context))[1] == 300 * (turn - 1)
            put(cache, context)
    assert cache.stored == 50 * 300 * 39


def test_what_was_used_least_recently_goes_first_and_from_its_end():
    cache = PrefixCache(30)
    put(cache, range(0, 10))
    put(cache, range(100, 110))
    put(cache, range(200, 210))
    cache.match(range(0, 10), 10)
    assert cache.hold(4)
    assert [cache.match(range(start, start + 10), 10)[1] for start in (0, 100, 200)] == [10, 6, 10]
    assert cache.stored + cache.held == 30


def test_what_a_running_request_uses_stays():
    cache = PrefixCache(30)
    put(cache, range(0, 20))
    node, length = cache.match(range(0, 20), 20)
    cache.lock(node)
    assert length == 20 and not cache.hold(11)
    assert cache.hold(10) and cache.free == 0
    cache.unlock(node)
    assert cache.hold(20) and cache.stored == 0


def test_a_cache_that_never_evicts_keeps_no_account_of_the_past():
    cache = PrefixCache(10**6)
    for number in range(5000):
        put(cache, [number % 7] * 10)
    assert len(cache._leaves) <= 2 * LEAST_LEAVES
    assert cache.hold(10**6 - 30) and cache.stored == 30  # and it still evicts the least recently used
    assert [cache.match([each] * 10, 10)[1] for each in ((4999 - back) % 7 for back in range(4))] == [10, 10, 10, 0]


def test_flushed_parts_count_until_their_users_end():
    cache = PrefixCache(100)
    put(cache, range(0, 40))
    put(cache, range(50, 80))
    node, _ = cache.match(range(0, 40), 30)
    cache.lock(node)
    cache.flush()
    assert cache.stored == 30 and cache.match(range(0, 40), 40)[1] == 0
    cache.unlock(node)
    assert cache.stored == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_uses_keeps_the_accounts(seed: int):
    generator = random.Random(seed)
    cache = PrefixCache(generator.randint(60, 300))
    running: list[tuple[object, int]] = []
    known: list[list[int]] = [[]]
    for _ in range(400):
        action = generator.random()
        if action < 0.6:
            tokens = [*generator.choice(known)[: generator.randint(0, 40)]]
            tokens += [generator.randint(0, 2) for _ in range(generator.randint(1, 20))]
            node, length = cache.match(tokens, len(tokens) - 1)
            assert length < len(tokens)
            cache.lock(node)
            if cache.hold(len(tokens) - length):
                running.append((node, len(tokens) - length))
                known.append(tokens)
            else:
                cache.unlock(node)
        elif running:
            node, held = running.pop(generator.randrange(len(running)))
            cache.unlock(node)  # type: ignore[arg-type]
            cache.drop(held)
            if action < 0.95:
                context = generator.choice(known)
                if context and cache.hold(len(context)):
                    cache.drop(len(context))
                    cache.store(context)
                    assert cache.match(context, len(context))[1] == len(context)
            else:
                cache.flush()
        assert min(cache.stored, cache.held) >= 0 and cache.stored + cache.held <= cache.capacity
    for node, held in running:
        cache.unlock(node)  # type: ignore[arg-type]
        cache.drop(held)
    assert cache.held == 0 and cache.hold(cache.capacity)
