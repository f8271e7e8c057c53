"""Which leading tokens of a context an engine still has the KV of: a radix tree with a bound, least recently used first out.

Pure. A context is any sequence whose slices compare equal when their tokens do: a list of ids; or a `range`, where only lengths
matter (a simulator gives each trajectory a range of its own: slices and comparisons of those cost nothing).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Tokens = Sequence[int]
LEAST_LEAVES = 64
"""So many entries of leaves are kept without a look at which of them are still true."""


class Node:
    """An edge of the tree: `tokens` after its parent's. `users`: running requests whose context goes through here."""

    __slots__ = ("children", "era", "parent", "tokens", "used_at", "users")

    def __init__(self, tokens: Tokens, parent: Node | None, era: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.era = era  # times the tree was flushed before
        self.children: dict[int, Node] = {}
        self.users = 0
        self.used_at = 0


class PrefixCache:
    """KV cache of one engine: `capacity` tokens, shared by the tree and by what running requests hold for themselves."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stored = 0  # tokens in the tree, and in flushed parts of it that running requests still use
        self.held = 0  # tokens of running requests outside it
        self._locked = 0  # of `stored`: those that running requests use
        self._era = 0
        self._root = Node((), None, 0)
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # (used_at when pushed, tie, node): some are no longer true
        self._ties = 0
        self._most_leaves = LEAST_LEAVES

    @property
    def free(self) -> int:
        """Tokens that fit without evicting."""
        return self.capacity - self.stored - self.held

    @property
    def room(self) -> int:
        """Tokens that fit, what nobody uses evicted."""
        return self.capacity - self.held - self._locked

    def match(self, tokens: Tokens, most: int) -> tuple[Node, int]:
        """The node at which the longest known prefix of at most `most` tokens ends, and its length. An edge is split there."""
        self._clock += 1
        node, length = self._root, 0
        while length < most:
            child = node.children.get(tokens[length])
            if child is None:
                break
            common = _common(child.tokens, tokens, length, most - length)
            child.used_at = self._clock
            length += common
            if common < len(child.tokens):
                node = self._split(child, common)
                break
            node = child
        return node, length

    def lock(self, node: Node) -> None:
        """A request runs on the prefix that ends at `node`: it stays."""
        each: Node | None = node
        while each is not None:
            if not each.users:
                self._locked += len(each.tokens)
            each.users += 1
            each = each.parent

    def unlock(self, node: Node) -> None:
        """The request has ended."""
        each: Node | None = node
        while each is not None:
            each.users -= 1
            assert each.users >= 0, "unlocked more often than locked"
            if not each.users:
                self._locked -= len(each.tokens)
                if each.era != self._era:
                    self.stored -= len(each.tokens)
                elif not each.children:
                    self._push(each)
            each = each.parent

    def hold(self, tokens: int) -> bool:
        """Take room for a running request, evicting what nobody uses; False, and nothing changed, if there is not enough."""
        if tokens > self.free and not self._evict(tokens - self.free):
            return False
        self.held += tokens
        return True

    def drop(self, tokens: int) -> None:
        """Give held room back."""
        self.held -= tokens
        assert self.held >= 0, "dropped more than was held"

    def store(self, tokens: Tokens) -> None:
        """Keep a context whose KV was computed. Room for what is new in it must be free: drop what was held for it first."""
        node, length = self.match(tokens, len(tokens))
        new = len(tokens) - length
        if not new:
            return
        assert new <= self.free, "stored more than was held"
        child = Node(tokens[length:], node, self._era)
        child.used_at = self._clock
        node.children[tokens[length]] = child
        self.stored += new
        self._push(child)

    def flush(self) -> None:
        """Forget all: other weights would compute another KV. What running requests use stays until they end."""
        self._era += 1
        self._root = Node((), None, self._era)
        self._leaves.clear()
        self.stored = self._locked

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge; returns the upper part."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.tokens)
        upper = Node(node.tokens[:at], parent, node.era)
        upper.users, upper.used_at = node.users, node.used_at
        parent.children[upper.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper

    def _push(self, node: Node) -> None:
        if node is not self._root:
            self._ties += 1
            heapq.heappush(self._leaves, (node.used_at, self._ties, node))
            if len(self._leaves) > self._most_leaves:
                self._tidy()

    def _tidy(self) -> None:
        """Each leaf once. Else a cache that never evicts would keep an entry of every request it ever served."""
        found: dict[Node, tuple[int, int, Node]] = {}
        for _, tie, node in self._leaves:
            if not (node.users or node.children or node.parent is None):
                found[node] = (node.used_at, tie, node)
        self._leaves = list(found.values())
        heapq.heapify(self._leaves)
        self._most_leaves = max(LEAST_LEAVES, 2 * len(self._leaves))

    def _evict(self, needed: int) -> bool:
        """Forget the ends of the leaves that were used least recently, until `needed` tokens more are free."""
        if needed > self.stored - self._locked:
            return False
        while needed > 0:
            used_at, _, node = heapq.heappop(self._leaves)
            if node.users or node.children or node.parent is None:
                continue  # in use, no leaf any more, or gone
            if used_at != node.used_at:
                self._push(node)
                continue
            gone = min(needed, len(node.tokens))
            needed -= gone
            self.stored -= gone
            if gone < len(node.tokens):
                node.tokens = node.tokens[: len(node.tokens) - gone]
                self._push(node)
            else:
                self._remove(node)
        return True

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        node.parent = None
        if not parent.children and not parent.users:
            self._push(parent)


def _common(edge: Tokens, tokens: Tokens, at: int, most: int) -> int:
    """How many tokens of `edge` are also at `at` in `tokens`, at most `most`."""
    limit = min(len(edge), most)
    if edge[:limit] == tokens[at : at + limit]:
        return limit
    low, high = 0, limit  # edge[:low] is common, edge[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low
