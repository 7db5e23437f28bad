"""Keys and values of prompts that came before, so that what requests have in common is computed once.

The tree of RadixAttention (https://arxiv.org/abs/2312.07104) in whole blocks: a node is a block of tokens with its keys
and values. It is named by the hash of all tokens up to its end, as in vLLM's prefix caching, so the tree is a dict.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.kv.cache_file import NO_NAMES, Form, chain_hashes, root_hash, states_hash
from llmc.runtime.kv.prefix_store import PrefixStore

BLOCK = 32

# Blocks of the positions start ... end - 1, as a cache reads them.
Read = Callable[[int, int], Sequence[NDArray[Any]]]


@dataclass(eq=False)
class _Node:
    """One block; its ancestors are the nodes of the earlier chain hashes."""

    chain: bytes
    values: NDArray[Any]
    pins: int = 0


@dataclass(frozen=True)
class Match:
    """A cached prefix."""

    length: int  # tokens, a multiple of the block size; 0 when nothing is cached
    blocks: tuple[NDArray[Any], ...]  # [values] of each block in the KV cache's layout; read-only
    states: NDArray[np.float32] | None = None  # after the last block; None of a cache without states


class PrefixCache:
    """Blocks of keys and values by the tokens that lead to them, in bounded memory, least recently used out first.

    For one thread; :attr:`bytes`, those in memory now, may be read from any.

    Args:
        key: all that the values depend on: fingerprint of the model, type and geometry of its cache.
        block: tokens per block, from 1; only whole blocks are kept.
        max_bytes: for the values in memory, from 0.
        store: a disk tier, which the caller closes.
        form: shape and type that blocks from disk must have; None takes any.
        states: form of the states that some blocks end with: a prefix ends at such a one. None of a cache without any.
    """

    def __init__(
        self,
        key: str,
        block: int = BLOCK,
        *,
        max_bytes: int,
        store: PrefixStore | None = None,
        form: Form | None = None,
        states: Form | None = None,
    ) -> None:
        self.key = key
        self.block = block
        self.max_bytes = max_bytes
        self._store = store
        self._form = form
        self._states = states
        # Least recently used first. A use renews a block before its parent, so the first one that is not pinned has
        # no children.
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self.bytes = 0
        self._pinned = 0  # bytes of nodes with pins
        self._block_bytes = 0  # of one block; known from the first one on

    @contextmanager
    def match(
        self, tokens: Sequence[int], limit: int | None = None, names: Sequence[str] = NO_NAMES
    ) -> Iterator[Match]:
        """The longest cached prefix of ``tokens`` in whole blocks, in memory or on disk; kept in memory until the block
        ends.

        Args:
            limit: tokens at most; all of them by default.
            names: all else that the values depend on; blocks inserted with other names are not used.
        """
        root, hashes = self._hashes(tokens, limit, names)
        path = self._path(hashes)
        self._pin(path)
        try:
            loaded = self._load(root, hashes[len(path) :])
            path += loaded
            length, states = len(path), None
            if self._states is not None:
                length, states = self._find_states(root, path)
            self._use(path)
            if self._store is not None and path and not loaded:
                self._store.touch(root, hashes[: len(path)])
            yield Match(length * self.block, tuple(node.values for node in path[:length]), states)
        finally:
            self._unpin(path)

    def _find_states(self, root: bytes, path: Sequence[_Node]) -> tuple[int, NDArray[np.float32] | None]:
        """The most blocks of a path at whose end states are kept, and these."""
        for count in range(len(path), 0, -1):
            name = states_hash(path[count - 1].chain)
            if (node := self._nodes.get(name)) is not None:
                self._nodes.move_to_end(name)
                return count, node.values
            found = self._store.load(root, [name], self.max_bytes - self._pinned) if self._store is not None else []
            if found and (found[0].shape, found[0].dtype) == self._states:
                self._keep_states(name, found[0])
                return count, found[0]
        return 0, None

    def _keep_states(self, name: bytes, values: NDArray[np.float32]) -> bool:
        """Keep states if memory has room for them."""
        if name in self._nodes or values.nbytes > self.max_bytes - self._pinned:
            return name in self._nodes
        values.flags.writeable = False
        self._evict(values.nbytes)
        self._nodes[name] = _Node(name, values)
        self.bytes += values.nbytes
        return True

    def insert(
        self,
        tokens: Sequence[int],
        read: Read,
        names: Sequence[str] = NO_NAMES,
        whole_from: int = 0,
        states: NDArray[np.float32] | None = None,
    ) -> int:
        """Keep the whole blocks of ``tokens`` that memory has room for, and write them to disk; the leading tokens
        cached now.

        Args:
            read: gives the blocks of a span of positions, which nobody changes any more; called once, if a block is
                missing.
            names: as of :meth:`match`.
            whole_from: the first position that it can read; where blocks before it are missing, nothing is added.
            states: those after the tokens, which are whole blocks then.
        """
        root, hashes = self._hashes(tokens, None, names)
        path = self._path(hashes)
        self._pin(path)
        try:
            start = len(path) * self.block
            if (missing := hashes[len(path) : len(path) + self._room()]) and start >= whole_from:
                path += self._add(missing, read(start, start + len(missing) * self.block))
            kept, name = len(path), states_hash(hashes[-1]) if hashes else b""
            whole = states is not None and 0 < kept == len(hashes) and self._keep_states(name, states)
            self._use(path)
            if self._store is not None and path:
                self._store.put(root, hashes[:kept], [node.values for node in path])
                if whole and states is not None:
                    self._store.put(root, [name], [states])
        finally:
            self._unpin(path)
        return len(path) * self.block

    def _hashes(self, tokens: Sequence[int], limit: int | None, names: Sequence[str]) -> tuple[bytes, list[bytes]]:
        root = root_hash(self.key, names)
        length = len(tokens) if limit is None else max(0, min(limit, len(tokens)))
        ids = np.asarray(tokens[: length - length % self.block], np.int64)
        return root, chain_hashes(root, ids, self.block)

    def _path(self, hashes: Sequence[bytes]) -> list[_Node]:
        path = []
        for chain in hashes:
            node = self._nodes.get(chain)
            if node is None:
                break
            path.append(node)
        return path

    def _room(self) -> int:
        """Blocks that fit once all that is not pinned is evicted; as many as there are bytes before the first one."""
        return (self.max_bytes - self._pinned) // max(1, self._block_bytes)

    def _load(self, root: bytes, hashes: Sequence[bytes]) -> list[_Node]:
        if self._store is None or not hashes:
            return []
        blocks = self._store.load(root, hashes, self.max_bytes - self._pinned)
        if self._form is not None:  # what the model could not take is not there
            blocks = list(takewhile(lambda block: (block.shape, block.dtype) == self._form, blocks))
        return self._add(hashes[: len(blocks)], blocks)

    def _add(self, hashes: Sequence[bytes], blocks: Sequence[NDArray[Any]]) -> list[_Node]:
        """Put blocks below a pinned path, pinned themselves, as many as there is room for."""
        if not blocks:
            return []
        self._block_bytes = blocks[0].nbytes
        added = []
        for chain, values in zip(hashes[: self._room()], blocks, strict=False):
            values.flags.writeable = False
            added.append(_Node(chain, values))
        needed = sum(node.values.nbytes for node in added)
        self._evict(needed)
        self._nodes.update((node.chain, node) for node in added)
        self.bytes += needed
        self._pin(added)
        return added

    def _evict(self, needed: int) -> None:
        """Make room for ``needed`` bytes, which must be there once all that is not pinned is gone."""
        excess, victims = self.bytes + needed - self.max_bytes, []
        if excess <= 0:
            return
        for node in self._nodes.values():
            if excess <= 0:
                break
            if not node.pins:
                victims.append(node)
                excess -= node.values.nbytes
        assert excess <= 0, excess
        for node in victims:
            del self._nodes[node.chain]
            self.bytes -= node.values.nbytes

    def _use(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._nodes.move_to_end(node.chain)

    def _pin(self, path: Sequence[_Node]) -> None:
        for node in path:
            node.pins += 1
            if node.pins == 1:
                self._pinned += node.values.nbytes

    def _unpin(self, path: Sequence[_Node]) -> None:
        for node in path:
            node.pins -= 1
            if not node.pins:
                self._pinned -= node.values.nbytes
