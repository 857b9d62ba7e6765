"""KV cache accounting in tokens, with SGLang's radix tree of prefixes: shared, locked while in use, evicted LRU.

A token of the pool is in one of three places: free, in the tree, or owned by a running request. A node of the tree
is evictable while nobody holds a lock below it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple


class Space(NamedTuple):
    """Whose prefixes a prompt may find: what one adapter computed, or one salt named, is no other's."""

    adapter: str | None = None
    """Id of the load of an adapter; None: the base."""
    salt: tuple[str, str] = ("", "")
    """`extra_key` and `cache_salt` of the request."""


BASE: Final = Space()


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of tokens that hangs below a common prefix."""

    tokens: tuple[int, ...]
    parent: "RadixNode | None"
    children: dict[int, "RadixNode"] = field(default_factory=dict[int, "RadixNode"])
    locks: int = 0
    used: int = 0
    """Logical time of the last use."""


class KVCache:
    """The pool of `capacity` tokens."""

    def __init__(self, capacity: int, *, share: bool = True) -> None:
        self.capacity = capacity
        self._share = share
        self._roots: dict[Space, RadixNode] = {}
        self._clock = 0
        self._in_tree = 0
        self._locked = 0
        self._owned = 0

    @property
    def free(self) -> int:
        """Tokens nobody holds."""
        return self.capacity - self._in_tree - self._owned

    @property
    def evictable(self) -> int:
        """Tokens that are cached and can be given away."""
        return self._in_tree - self._locked

    @property
    def used(self) -> int:
        """Tokens in real use: neither free nor evictable."""
        return self._owned + self._locked

    def match(self, tokens: Sequence[int], space: Space = BASE) -> tuple[RadixNode, int]:
        """The node that ends the longest cached prefix of `tokens`, and that prefix's length."""
        self._clock += 1
        node, length = self._root(space), 0
        while length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                break
            same = _common(child.tokens, tokens, length)
            child.used = self._clock
            if same < len(child.tokens):
                child = self._split(child, same)
            node, length = child, length + same
        return node, length

    def lock(self, node: RadixNode) -> None:
        """Keeps the prefix that ends at `node` from eviction."""
        at: RadixNode | None = node
        while at is not None:
            if at.locks == 0:
                self._locked += len(at.tokens)
            at.locks += 1
            at = at.parent

    def unlock(self, node: RadixNode) -> None:
        at: RadixNode | None = node
        while at is not None:
            at.locks -= 1
            if at.locks == 0:
                self._locked -= len(at.tokens)
            at = at.parent

    def take(self, tokens: int) -> bool:
        """Gives `tokens` tokens to a request, evicting if it must. False, and nothing changes, if there are too few."""
        if tokens > self.free + self.evictable:
            return False
        if tokens > self.free:
            self._evict(tokens - self.free)
        self._owned += tokens
        return True

    def give_back(self, tokens: int) -> None:
        """A request drops `tokens` tokens that it owned."""
        self._owned -= tokens

    def insert(self, tokens: Sequence[int], owned: int, space: Space = BASE) -> RadixNode:
        """Moves the last `owned` of these tokens from a request into the tree; duplicates become free."""
        self._owned -= owned
        if not self._share:
            return self._root(space)
        node, length = self.match(tokens, space)
        rest = tuple(tokens[length:])
        if rest:
            child = RadixNode(rest, node, used=self._clock)
            node.children[rest[0]] = child
            self._in_tree += len(rest)
            node = child
        return node

    def flush(self) -> None:
        """Forgets everything. Only while nothing runs."""
        self._roots.clear()
        self._in_tree = self._locked = 0

    def _root(self, space: Space) -> RadixNode:
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = RadixNode((), None, locks=1)
        return root

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cuts `node` after `at` tokens; returns the upper half."""
        parent = node.parent
        upper = RadixNode(node.tokens[:at], parent, {node.tokens[at]: node}, node.locks, node.used)
        if parent is not None:
            parent.children[upper.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        return upper

    def _evict(self, tokens: int) -> None:
        leaves = [(n.used, id(n), n) for n in self._nodes() if not n.children and n.locks == 0]
        heapq.heapify(leaves)
        while tokens > 0 and leaves:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            if parent is None:
                continue
            del parent.children[leaf.tokens[0]]
            self._in_tree -= len(leaf.tokens)
            tokens -= len(leaf.tokens)
            if parent.parent is not None and not parent.children and parent.locks == 0:
                heapq.heappush(leaves, (parent.used, id(parent), parent))

    def _nodes(self) -> list[RadixNode]:
        found: list[RadixNode] = []
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found


def _common(run: tuple[int, ...], tokens: Sequence[int], offset: int) -> int:
    length = min(len(run), len(tokens) - offset)
    for i in range(length):
        if run[i] != tokens[offset + i]:
            return i
    return length
