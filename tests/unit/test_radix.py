"""The prefix cache against a model of it: a dict of pages, each known by all tokens up to its end."""

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


def array(items: list[int] | range) -> np.ndarray:
    """Token ids, or pages."""
    return np.array(items, dtype=np.int32)


class CacheMachine(RuleBasedStateMachine):
    """Prompts are looked up, stored and locked; pages are evicted."""

    @initialize(size=st.integers(1, 3))
    def make(self, size: int) -> None:
        self.cache, self.size = PrefixCache(size), size
        self.pages: dict[Key, int] = {}
        """Page by all tokens up to its end."""
        self.used: dict[Key, int] = {}
        """When it was looked up or stored last."""
        self.locks: list[tuple[Node, list[Key]]] = []
        self.next_page, self.clock = 1, 0

    def cut(self, tokens: list[int]) -> list[Key]:
        """Keys of all whole pages of a prompt."""
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def found(self, tokens: list[int]) -> list[Key]:
        """The pages that are cached of it, all used now."""
        keys = [key for key in self.cut(tokens) if key in self.pages]
        self.clock += 1
        self.used |= dict.fromkeys(keys, self.clock)
        return keys

    @rule(tokens=TOKENS, lock=st.booleans())
    def match(self, tokens: list[int], lock: bool) -> None:
        """The longest cached beginning, in whole pages."""
        keys = self.found(tokens)
        pages, node = self.cache.match_prefix(array(tokens))
        assert pages.tolist() == [self.pages[key] for key in keys]
        if lock:
            self.cache.lock(node)
            self.locks.append((node, keys))

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        """Pages that the cache had stay, the others are its from now on."""
        keys = self.cut(tokens)
        self.found(tokens)
        ours = list(range(self.next_page, self.next_page + len(keys)))
        self.next_page += len(keys)
        pages, _ = self.cache.insert(array(tokens[: len(keys) * self.size]), array(ours))
        for key, page in zip(keys, ours, strict=True):
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
        """One page after the other: of those that nobody reads and none follows, the least recently used one."""
        expected = []
        locked = self.locked()
        while len(expected) < count:
            parents = {key[: -self.size] for key in self.pages}
            last = [key for key in self.pages if key not in locked and key not in parents]
            if not last:
                break
            key = min(last, key=lambda k: self.used[k])
            expected.append(self.pages.pop(key))
        assert self.cache.evict_pages(count).tolist() == expected

    def locked(self) -> set[Key]:
        """Pages that somebody reads."""
        return {key for _, keys in self.locks for key in keys}

    @invariant()
    def the_tree_is_the_dict(self) -> None:
        found: dict[Key, int] = {}
        for _, tokens, pages in iter_nodes(self.cache.root):
            found |= dict(zip(self.cut(tokens), pages, strict=True))
        assert found == self.pages
        assert self.cache.pages == len(self.pages)
        assert self.cache.evictable == len(self.pages.keys() - self.locked())

    @invariant()
    def candidates_for_eviction_are_nodes_of_the_tree_each_once(self) -> None:
        """The queue cannot grow for ever, and no page that could be evicted is forgotten."""
        nodes = [node for node, _, _ in iter_nodes(self.cache.root)]
        queued = [node for _, _, node in self.cache._queue]
        assert len(set(map(id, queued))) == len(queued)
        assert set(map(id, queued)) <= set(map(id, nodes))
        assert {id(n) for n in nodes if not n.locks and not n.children} <= set(map(id, queued))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_two_prompts_that_share_two_pages():
    """The picture of the module: pages of two tokens; 4 9 are shared, then one goes on with 2, the other with 7 3."""
    cache = PrefixCache(2)
    cache.insert(array([1, 1, 2, 2, 3, 3]), array([4, 9, 2]))
    pages, _ = cache.insert(array([1, 1, 2, 2, 5, 5, 6, 6]), array([11, 12, 7, 3]))
    assert pages.tolist() == [4, 9, 7, 3], "11 and 12 stay the caller's"
    assert cache.pages == 5
    assert cache.match_prefix(array([1, 1, 2, 2, 9, 9]))[0].tolist() == [4, 9]
    assert cache.match_prefix(array([1, 1, 2]))[0].tolist() == [4], "half a page is none"


def test_a_reader_keeps_its_pages_and_not_those_behind_them():
    """Three pages are cached, somebody reads two of them."""
    cache = PrefixCache(1)
    cache.insert(array([1, 2, 3]), array([4, 5, 6]))
    _, node = cache.match_prefix(array([1, 2]))
    cache.lock(node)
    assert (cache.evictable, cache.evict_pages(9).tolist()) == (1, [6])
    cache.unlock(node)
    assert cache.evict_pages(9).tolist() == [5, 4], "the end first, as a beginning is of use without it"


def test_what_a_later_prompt_splits_stays_locked_on_both_sides():
    """Somebody reads three pages; another prompt shares one of them, and divides the node."""
    cache = PrefixCache(1)
    _, node = cache.insert(array([1, 2, 3]), array([4, 5, 6]))
    cache.lock(node)
    cache.match_prefix(array([1, 9]))
    assert (cache.evictable, cache.evict_pages(9).tolist()) == (0, [])
    cache.unlock(node)
    assert cache.evictable == 3


def test_mistakes_of_the_caller_are_refused():
    cache = PrefixCache(2)
    with pytest.raises(ValueError, match="3 tokens do not fill 1 pages of 2"):
        cache.insert(array([1, 2, 3]), array([4]))
    _, node = cache.insert(array([1, 2]), array([4]))
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(node)
