"""Prefix cache of one attention replica: a radix tree over virtual pages, with LRU eviction.

A node holds some pages and the tokens in them; its children continue with different tokens. Nodes are split only at
whole pages of `virtual_page` tokens (page_size · dcp), so that a hit starts a request on the same ownership as its own
pages.

    root ── [pages 4 9] ─┬─ [page 2]          two prompts that share two pages
                         └─ [pages 7 3]

A reader of pages locks their node, and with it all nodes above. Unlocked nodes may be evicted, leaves first.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.serving.allocator import NO_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_TOKENS = np.empty(0, dtype=np.int32)


class Node:
    """Some pages in a row; made and changed by PrefixCache only."""

    __slots__ = ("children", "locks", "pages", "parent", "queued", "tokens", "used")

    def __init__(self, parent: Node | None, tokens: np.ndarray, pages: np.ndarray, used: int) -> None:
        self.parent, self.tokens, self.pages, self.used = parent, tokens, pages, used
        self.children: dict[bytes, Node] = {}
        self.locks = 0  # readers of this node or of one below it
        self.queued = False  # True if the node is in the queue of candidates for eviction


class PrefixCache:
    """Map of prompt tokens to pages. It owns the pages taken over by `insert`, until `evict_pages` returns them."""

    def __init__(self, virtual_page: int) -> None:
        self.virtual_page = virtual_page
        self.root = Node(None, NO_TOKENS, NO_PAGES, 0)
        self.pages = 0  # pages that the cache owns
        self.evictable = 0  # number of unlocked pages
        self._clock = 0
        self._queue: list[tuple[int, int, Node]] = []
        """Heap of (last use when queued, tie-break, node), with each node once: all unlocked leaves, and nodes that
        were unlocked leaves when they were queued. Entries are checked on eviction, so that finding the least recently
        used page takes no walk through the tree.
        """
        self._queued = itertools.count()

    def match_prefix(self, tokens: np.ndarray) -> tuple[np.ndarray, Node]:
        """Return the pages of the longest cached prefix of `tokens`, in whole pages, and the node at its end.

        Counts as a use. Lock the node before the next eviction.
        """
        self._clock += 1
        node, found, rest = self.root, [NO_PAGES], tokens
        while (child := self._find_child(node, rest)) is not None:
            node = self._split_node(child, self._count_common_pages(child, rest))
            node.used = self._clock
            found.append(node.pages)
            rest = rest[len(node.tokens) :]
        return NO_PAGES if node is self.root else np.concatenate(found), node

    def insert(self, tokens: np.ndarray, pages: np.ndarray) -> tuple[np.ndarray, Node]:
        """Insert whole pages of `tokens` and their page numbers into the tree; return the tree's own pages and the
        node.

        If the tree had a page for the same tokens it keeps that one: then the returned page differs from the given one,
        which still belongs to the caller. The cache takes over all others.
        """
        if len(tokens) != len(pages) * self.virtual_page:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.virtual_page}")
        held, node = self.match_prefix(tokens)
        new = pages[len(held) :].copy()
        if len(new):
            rest = tokens[len(held) * self.virtual_page :].copy()
            child = Node(node, rest, new, self._clock)
            node.children[self._make_key(rest)] = child
            self.pages += len(new)
            self.evictable += len(new)
            self._enqueue(child)
            node = child
        return np.concatenate((held, new)), node

    def lock(self, node: Node) -> None:
        """Keep a node and all above it."""
        for each in self._walk_up(node):
            if not each.locks:
                self.evictable -= len(each.pages)
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Take one lock back. Raises ValueError for a node that is not locked."""
        for each in self._walk_up(node):
            if not each.locks:
                raise ValueError("this part of the prefix cache is not locked")
            each.locks -= 1
            if not each.locks:
                self.evictable += len(each.pages)
                self._enqueue(each)

    def evict_pages(self, count: int) -> np.ndarray:
        """Evict up to `count` unlocked pages, least recently used first, and return them; the caller owns them."""
        given: list[np.ndarray] = [NO_PAGES]
        while count > 0 and (leaf := self._remove_lru_leaf()) is not None:
            kept = max(len(leaf.pages) - count, 0)
            gone = leaf.pages[kept:]
            given.append(gone[::-1])
            count -= len(gone)
            self.pages -= len(gone)
            self.evictable -= len(gone)
            if kept:
                leaf.pages, leaf.tokens = leaf.pages[:kept], leaf.tokens[: kept * self.virtual_page]
                self._enqueue(leaf)
            else:
                self._remove_leaf(leaf)
        return np.concatenate(given)

    def _enqueue(self, node: Node) -> None:
        """Queue a node for eviction, if it is an unlocked leaf and not queued already."""
        if not (node.queued or node.locks or node.children or node is self.root):
            node.queued = True
            heapq.heappush(self._queue, (node.used, next(self._queued), node))

    def _remove_lru_leaf(self) -> Node | None:
        """Remove the least recently used unlocked leaf from the queue and return it; None if there is none."""
        while self._queue:
            used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if used == node.used and not node.locks and not node.children:
                return node
            self._enqueue(node)  # used since then, or of no interest until it is unlocked or loses its children
        return None

    def _remove_leaf(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._make_key(leaf.tokens)]
        self._enqueue(parent)

    def _make_key(self, tokens: np.ndarray) -> bytes:
        return tokens[: self.virtual_page].tobytes()

    def _find_child(self, node: Node, rest: np.ndarray) -> Node | None:
        return node.children.get(self._make_key(rest)) if len(rest) >= self.virtual_page else None

    def _count_common_pages(self, node: Node, rest: np.ndarray) -> int:
        """Return the number of the node's pages that hold the same tokens as the beginning of `rest`."""
        length = min(len(node.tokens), len(rest))
        differ = np.flatnonzero(node.tokens[:length] != rest[:length])
        return int(differ[0] if len(differ) else length) // self.virtual_page

    def _split_node(self, node: Node, pages: int) -> Node:
        """Split a node after `pages` of its pages if it has more; return the upper part."""
        if pages == len(node.pages):
            return node
        parent, cut = node.parent, pages * self.virtual_page
        assert parent is not None
        upper = Node(parent, node.tokens[:cut], node.pages[:pages], node.used)
        upper.locks = node.locks
        parent.children[self._make_key(upper.tokens)] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[pages:]
        upper.children[self._make_key(node.tokens)] = node
        return upper

    def _walk_up(self, node: Node) -> Iterator[Node]:
        while node is not self.root:
            yield node
            assert node.parent is not None
            node = node.parent
