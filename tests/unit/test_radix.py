"""The prefix cache compared with a model of it, a dict of pages with all tokens up to their end as keys."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcpbench.serving.radix import Node, PrefixCache
from tests.unit.serving_builder import iter_nodes

LENGTH = 12
TOKENS = st.lists(st.integers(0, 1), max_size=LENGTH)  # few different tokens, so that prompts share beginnings

Key = tuple[int, ...]


def make_array(items: list[int] | range) -> np.ndarray:
    """Return token ids or pages as an array."""
    return np.array(items, dtype=np.int32)


class CacheMachine(RuleBasedStateMachine):
    """Looks up, stores and locks prompts, and evicts pages, at random."""

    @initialize(size=st.integers(1, 3))
    def make(self, size: int) -> None:
        self.cache, self.size = PrefixCache(size), size
        self.pages: dict[Key, int] = {}
        """Page for all tokens up to its end."""
        self.used: dict[Key, int] = {}
        """Time of the last look-up or insertion."""
        self.locks: list[tuple[Node, list[Key]]] = []
        self.next_page, self.clock = 1, 0

    def make_keys(self, tokens: list[int]) -> list[Key]:
        """Return the keys of all complete pages of a prompt."""
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def use_cached(self, tokens: list[int]) -> list[Key]:
        """Return the cached pages of a prompt and mark them as used now."""
        keys = [key for key in self.make_keys(tokens) if key in self.pages]
        self.clock += 1
        self.used |= dict.fromkeys(keys, self.clock)
        return keys

    @rule(tokens=TOKENS, lock=st.booleans())
    def match(self, tokens: list[int], lock: bool) -> None:
        """Look up the longest cached beginning, in complete pages."""
        keys = self.use_cached(tokens)
        pages, node = self.cache.match_prefix(make_array(tokens))
        assert pages.tolist() == [self.pages[key] for key in keys]
        if lock:
            self.cache.lock(node)
            self.locks.append((node, keys))

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        """Insert a prompt: pages that the cache has are kept, and the others become its own."""
        keys = self.make_keys(tokens)
        self.use_cached(tokens)
        own = list(range(self.next_page, self.next_page + len(keys)))
        self.next_page += len(keys)
        pages, _ = self.cache.insert(make_array(tokens[: len(keys) * self.size]), make_array(own))
        for key, page in zip(keys, own, strict=True):
            if key not in self.pages:
                self.pages[key], self.used[key] = page, self.clock
        assert pages.tolist() == [self.pages[key] for key in keys]

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(node)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        """Evict pages one by one: the least recently used one without readers and without a following page."""
        expected = []
        locked = self.find_locked()
        while len(expected) < count:
            parents = {key[: -self.size] for key in self.pages}
            last = [key for key in self.pages if key not in locked and key not in parents]
            if not last:
                break
            key = min(last, key=lambda k: self.used[k])
            expected.append(self.pages.pop(key))
        assert self.cache.evict_pages(count).tolist() == expected

    def find_locked(self) -> set[Key]:
        """Return the pages with readers."""
        return {key for _, keys in self.locks for key in keys}

    @invariant()
    def check_tree_equals_dict(self) -> None:
        found: dict[Key, int] = {}
        for _, tokens, pages in iter_nodes(self.cache.root):
            found |= dict(zip(self.make_keys(tokens), pages, strict=True))
        assert found == self.pages
        assert self.cache.pages == len(self.pages)
        assert self.cache.evictable == len(self.pages.keys() - self.find_locked())

    @invariant()
    def check_eviction_queue(self) -> None:
        """Check that the queue has only nodes of the tree, each at most once, and all that could be evicted."""
        nodes = [node for node, _, _ in iter_nodes(self.cache.root)]
        queued = [node for _, _, node in self.cache._queue]
        assert len(set(map(id, queued))) == len(queued)
        assert set(map(id, queued)) <= set(map(id, nodes))
        assert {id(n) for n in nodes if not n.locks and not n.children} <= set(map(id, queued))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_two_prompts_share_two_pages():
    """The drawing in the module has pages of two tokens: 4 9 are shared; one prompt continues with 2, the other with 7
    3.
    """
    cache = PrefixCache(2)
    cache.insert(make_array([1, 1, 2, 2, 3, 3]), make_array([4, 9, 2]))
    pages, _ = cache.insert(make_array([1, 1, 2, 2, 5, 5, 6, 6]), make_array([11, 12, 7, 3]))
    assert pages.tolist() == [4, 9, 7, 3], "11 and 12 still belong to the caller"
    assert cache.pages == 5
    assert cache.match_prefix(make_array([1, 1, 2, 2, 9, 9]))[0].tolist() == [4, 9]
    assert cache.match_prefix(make_array([1, 1, 2]))[0].tolist() == [4], "half a page does not match"


def test_lock_keeps_pages_of_a_prefix_but_not_later_ones():
    """Three pages are cached, and a reader has two of them."""
    cache = PrefixCache(1)
    cache.insert(make_array([1, 2, 3]), make_array([4, 5, 6]))
    _, node = cache.match_prefix(make_array([1, 2]))
    cache.lock(node)
    assert (cache.evictable, cache.evict_pages(9).tolist()) == (1, [6])
    cache.unlock(node)
    assert cache.evict_pages(9).tolist() == [5, 4], "the end is evicted first, as the beginning is useful without it"


def test_split_node_stays_locked_on_both_sides():
    """A reader has three pages; another prompt shares one of them and splits the node."""
    cache = PrefixCache(1)
    _, node = cache.insert(make_array([1, 2, 3]), make_array([4, 5, 6]))
    cache.lock(node)
    cache.match_prefix(make_array([1, 9]))
    assert (cache.evictable, cache.evict_pages(9).tolist()) == (0, [])
    cache.unlock(node)
    assert cache.evictable == 3


def test_invalid_calls_raise_value_error():
    cache = PrefixCache(2)
    with pytest.raises(ValueError, match="3 tokens do not fill 1 pages of 2"):
        cache.insert(make_array([1, 2, 3]), make_array([4]))
    _, node = cache.insert(make_array([1, 2]), make_array([4]))
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(node)
