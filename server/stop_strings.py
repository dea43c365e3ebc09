"""Finds the first of several strings in a text that arrives piece by piece.

Knows characters only; tokens and what to do at a match are the detokenizer's business.
"""

from collections import deque
from collections.abc import Sequence


class StopFinder:
    """An Aho-Corasick automaton (Aho and Corasick, 1975) over all stop strings at once.

    Each character costs one step whatever the number of strings. The state is the longest suffix
    of the text that begins some stop string, which is also what must be held back.

    Example: stops "DEFG" and "FX". After "ABCDEF" the state spells "DEF", so `num_held` is 3; "G" completes
    "DEFG", while "X" would complete "FX" because the state "DEF" falls back to "F".
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._match: list[str] = [""]
        self._state = 0
        for stop in stops:
            self._insert(stop)
        self._link()

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that could still become a stop string."""
        state = self._state
        while not self._children[state] and state:
            state = self._fallback[state]
        return self._depth[state]

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """Read on through `text` and return (end of the match within `text`, stop string), or None.

        The match that ends first wins, and the longest of those that end together. Not armed, it
        reads everything and reports nothing.
        """
        for index, char in enumerate(text):
            self._state = self._step(self._state, char)
            if armed and self._match[self._state]:
                return index + 1, self._match[self._state]
        return None

    def _step(self, state: int, char: str) -> int:
        while char not in self._children[state] and state:
            state = self._fallback[state]
        return self._children[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._children[state]:
                self._children[state][char] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append("")
            state = self._children[state][char]
        self._match[state] = stop

    def _link(self) -> None:
        """Give each state its fallback, shallow states first; matches are inherited along it."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._children[state].items():
                self._fallback[child] = self._step(self._fallback[state], char)
                queue.append(child)
            self._match[state] = self._match[state] or self._match[self._fallback[state]]
