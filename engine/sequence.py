"""Sequence: the live state of one request. Owned and changed by the engine thread alone."""

from collections import Counter
from collections.abc import Sequence as Seq

from headway.engine.request import Finish, FinishReason, Request, SpeculationStats, Timing


class Sequence:
    """A request's tokens so far, and how much of them the KV cache holds.

    Example, block size 4, prompt of 6 tokens, one token generated, cache filled up to the prompt:

        tokens        p0 p1 p2 p3 | p4 p5 g0
        num_computed  6                        keys and values of p0..p5 are in the cache
        block_table   [12, 7]                  p5 is at slot 7 * 4 + 1
        pending       [g0]                     what the next pass has to compute: its span
    """

    def __init__(self, request: Request, arrived: float) -> None:
        self.request = request
        self.tokens: list[int] = list(request.prompt_ids)
        self.num_computed = 0
        self.block_table: list[int] = []
        self.num_hashed_blocks = 0
        """Leading blocks of block_table that the prefix cache knows by hash."""
        self.last_block_hash = b""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at first admission."""
        self.num_preempted_tokens = 0
        """Tokens that a preemption took out of the cache: computing them again is no progress."""
        self.num_scored = 0
        """Prompt positions whose logprobs were already reported."""
        self.output_counts: Counter[int] = Counter()
        """How often each token occurs in the answer; penalties read it."""
        self.draft_luck = 0.0
        """Log odds by which its drafts do better than others; draft_chances.py keeps it."""
        self.timing = Timing(arrived)
        self.speculation = SpeculationStats()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not in the cache; at least one, the root of a tree."""
        return len(self.tokens) - self.num_computed

    def extend(self, token_ids: Seq[int], eos_token_ids: Seq[int]) -> Finish | None:
        """Append generated tokens up to the first that ends the sequence, and say why it ended.

        What follows an end is dropped: a run of accepted drafts may reach past it.
        """
        stopping = self.request.stopping
        for token_id in token_ids:
            if self.num_generated >= stopping.max_new_tokens:
                break
            self.tokens.append(token_id)
            self.output_counts[token_id] += 1
            if token_id in eos_token_ids and not stopping.ignore_eos:
                return Finish(FinishReason.EOS, token_id)
            if token_id in stopping.stop_token_ids:
                return Finish(FinishReason.STOP_TOKEN, token_id)
        if self.num_generated >= stopping.max_new_tokens:
            return Finish(FinishReason.LENGTH)
        return None
