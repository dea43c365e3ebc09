"""BlockPool: which cache block belongs to whom, and which prefixes can be shared. Host only."""

import hashlib
from array import array
from collections import OrderedDict

from headway.engine.sequence import Sequence


class BlockPool:
    """Hands blocks of the KV cache to sequences and takes them back.

    A block is free (nobody's, content worthless), cached (nobody's, but known by the hash of all
    tokens up to its end, so that an equal prefix can have it back), or active (in one or more block
    tables). A cached block is reclaimed when no free one is left, the longest unused first.

    Example, block size 2, salt "": A has tokens 1 2 3 4 5 and ends; its blocks are then known as
    h1 = sha256(sha256("") + 1 2) and h2 = sha256(h1 + 3 4). B comes with 1 2 3 4 6: it takes both and
    computes only token 6. C comes with 1 2 9: it takes h1 and computes 9. Requests with another salt
    start from another hash and share nothing with these.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        """Cached blocks that were reclaimed for other content."""
        self._prefix_cache = prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_owners = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `grow` can still hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def share_prefix(self, sequence: Sequence) -> None:
        """Give a sequence without blocks those of its longest known prefix.

        The last token is left to compute, since a step needs its logits.
        """
        assert not sequence.block_table
        self._start_hashes(sequence)
        wants_all_logits = sequence.request.num_prompt_logprobs is not None
        if wants_all_logits or not self._shares(sequence):
            return
        for index in range((len(sequence.tokens) - 1) // self.block_size):
            key = self._hash(sequence, index)
            block = self._block_of.get(key)
            if block is None:
                return
            self._own(block)
            sequence.block_table.append(block)
            sequence.last_block_hash = key
            sequence.num_hashed_blocks += 1
            sequence.num_computed += self.block_size

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block table to cover `num_tokens` tokens. False, and no change, without room."""
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            block = self._free.pop() if self._free else self._reclaim()
            self._num_owners[block] = 1
            sequence.block_table.append(block)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Make the blocks that the sequence has filled findable by their hash."""
        if not self._shares(sequence):
            return
        for index in range(sequence.num_hashed_blocks, sequence.num_computed // self.block_size):
            key = self._hash(sequence, index)
            block = sequence.block_table[index]
            if key not in self._block_of:
                self._block_of[key] = block
                self._hash_of[block] = key
            sequence.last_block_hash = key
            sequence.num_hashed_blocks += 1

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back. Ends of prefixes are reclaimed before their beginnings."""
        for block in reversed(sequence.block_table):
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)
        sequence.block_table.clear()
        sequence.num_computed = 0

    def _shares(self, sequence: Sequence) -> bool:
        return self._prefix_cache and sequence.request.use_prefix_cache

    def _own(self, block: int) -> None:
        self._cached.pop(block, None)
        self._num_owners[block] += 1

    def _reclaim(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        self.num_evicted += 1
        return block

    def _start_hashes(self, sequence: Sequence) -> None:
        sequence.num_hashed_blocks = 0
        sequence.last_block_hash = hashlib.sha256(sequence.request.cache_salt.encode()).digest()

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of block `index`, given that of the block before it."""
        start = index * self.block_size
        tokens = array("q", sequence.tokens[start : start + self.block_size])
        return hashlib.sha256(sequence.last_block_hash + tokens.tobytes()).digest()
