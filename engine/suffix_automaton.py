"""SuffixAutomaton: which runs of tokens a growing text has repeated, and what came after them.

Knows nothing of sequences, requests or drafts.
"""

from collections.abc import Iterable

MAX_COUNTED = 32
"""An occurrence is counted for this many of the repeated runs that end at it, longest first."""


class SuffixAutomaton:
    """The smallest automaton of all runs of a text, extended token by token.

    Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); amortised
    O(1) a token. A state is a set of runs that end at the same places. It is known by the longest
    of them, of `lengths[state]` tokens; state 0 is the empty run. `links[state]` is the longest
    suffix of these runs that also ends elsewhere, so the link of the whole text is the longest
    suffix that occurred before: the match needs no search. `counts[state]` says at how many places
    the runs end.

    Example, text 7 8 9 7 8:

        state        0      1     2     3       4         5
        longest run  -      7     78    789     7897      78978
        lengths      0      1     2     3       4         5
        links       -1      0     0     0       1         2
        counts       -      2     2     1       1         1
        transitions  7->1   8->2  9->3  7->4    8->5      none
                     8->2
                     9->3

    The text is state 5. Its link is state 2, so the match is 7 8, seen twice, and its transition
    says that 9 came after it, counts[3] = 1 time.

    Adding a place to the counts means a walk up all links, which in "a a a a" are as many as the
    text has tokens; the walk stops after MAX_COUNTED. Counts of runs far inside much longer
    repeated ones are then too low, never zero. They only rank drafts.

    Memory: at most 2 states and 3 transitions a token, which is 0.4 kB a token of prose and 0.6 kB
    of random text of two tokens. Time: 1 to 2 us a token.
    """

    def __init__(self) -> None:
        self.transitions: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.lengths = [0]
        self.counts = [0]
        self.num_tokens = 0
        self._text = 0
        """The state of the whole text."""

    @property
    def match(self) -> int:
        """The state of the longest suffix of the text that occurred before; 0 where none did."""
        return max(self.links[self._text], 0)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            self._append(token_id)
            self._count()

    def _append(self, token_id: int) -> None:
        transitions, lengths = self.transitions, self.lengths
        self.num_tokens += 1
        state, self._text = self._text, self._add_state({}, self.num_tokens, 0, 0)
        while state >= 0 and token_id not in transitions[state]:
            transitions[state][token_id] = self._text
            state = self.links[state]
        if state < 0:
            return
        target = transitions[state][token_id]
        if lengths[target] > lengths[state] + 1:
            target = self._split(state, token_id, target)
        self.links[self._text] = target

    def _split(self, state: int, token_id: int, target: int) -> int:
        """Move the shorter runs of `target`, which now end at one place more, to a new state."""
        shorter = self._add_state(
            self.transitions[target].copy(),
            self.lengths[state] + 1,
            self.links[target],
            self.counts[target],
        )
        self.links[target] = shorter
        while state >= 0 and self.transitions[state].get(token_id) == target:
            self.transitions[state][token_id] = shorter
            state = self.links[state]
        return shorter

    def _add_state(self, transitions: dict[int, int], length: int, link: int, count: int) -> int:
        self.transitions.append(transitions)
        self.lengths.append(length)
        self.links.append(link)
        self.counts.append(count)
        return len(self.links) - 1

    def _count(self) -> None:
        links, counts, state = self.links, self.counts, self._text
        for _ in range(MAX_COUNTED):
            if state == 0:
                break
            counts[state] += 1
            state = links[state]
