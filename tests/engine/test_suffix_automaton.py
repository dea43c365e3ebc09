"""The automaton against what can be read off the text itself."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from headway.engine.suffix_automaton import MAX_COUNTED, SuffixAutomaton

TEXTS = [(2, 1), (2, 7), (2, 61), (3, 33), (5, 61), (40, 63)]
"""Alphabet size and length; in none are more than MAX_COUNTED repeated runs nested."""


def random_text(alphabet: int, length: int, seed: int) -> list[int]:
    rng = random.Random(f"{alphabet} {length} {seed}")
    return [rng.randrange(alphabet) for _ in range(length)]


def ends_of(run: list[int], text: list[int]) -> list[int]:
    """Where in the text the run ends; each index is one past its last token."""
    return [end for end in range(len(run), len(text) + 1) if text[end - len(run) : end] == run]


def longest_repeated_suffix(text: list[int]) -> list[int]:
    return next(text[i:] for i in range(1, len(text) + 1) if len(ends_of(text[i:], text)) > 1)


def states_of_runs(
    automaton: SuffixAutomaton, text: list[int]
) -> Iterator[tuple[list[int], int | None]]:
    """Every run of the text with the state that reading it leads to."""
    for start in range(len(text)):
        state: int | None = 0
        for end in range(start, len(text)):
            state = None if state is None else automaton.transitions[state].get(text[end])
            yield text[start : end + 1], state


@pytest.mark.parametrize(("alphabet", "length"), TEXTS)
@pytest.mark.parametrize("seed", range(3))
def test_match_and_its_continuations_after_every_token(
    alphabet: int, length: int, seed: int
) -> None:
    text, automaton = random_text(alphabet, length, seed), SuffixAutomaton()
    for end in range(1, length + 1):
        automaton.extend([text[end - 1]])
        prefix = text[:end]
        suffix = longest_repeated_suffix(prefix)
        ends = ends_of(suffix, prefix)
        assert automaton.num_tokens == end
        assert automaton.lengths[automaton.match] == len(suffix)
        if suffix:
            assert automaton.counts[automaton.match] == len(ends)
            followed_by = automaton.transitions[automaton.match].items()
            assert {
                token_id: automaton.counts[state] for token_id, state in followed_by
            } == Counter(prefix[end] for end in ends if end < len(prefix))


@pytest.mark.parametrize(("alphabet", "length"), TEXTS)
def test_reads_the_runs_of_the_text_and_no_others(alphabet: int, length: int) -> None:
    text, automaton = random_text(alphabet, length, 7), SuffixAutomaton()
    automaton.extend(text)
    runs = 0
    for run, state in states_of_runs(automaton, text):
        assert state is not None
        assert automaton.counts[state] == len(ends_of(run, text))
        assert automaton.lengths[automaton.links[state]] < len(run) <= automaton.lengths[state]
        absent = [token for token in range(alphabet) if not ends_of([*run, token], text)]
        assert not set(absent) & automaton.transitions[state].keys()
        runs += 1
    assert runs == length * (length + 1) // 2
    assert len(automaton.links) <= max(2 * length, 2)
    assert sum(map(len, automaton.transitions)) <= 3 * length


def test_the_example_of_the_docstring() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([7, 8, 9, 7, 8])
    assert automaton.lengths == [0, 1, 2, 3, 4, 5]
    assert automaton.links == [-1, 0, 0, 0, 1, 2]
    assert automaton.counts[1:] == [2, 2, 1, 1, 1]
    assert automaton.transitions == [{7: 1, 8: 2, 9: 3}, {8: 2}, {9: 3}, {7: 4}, {8: 5}, {}]
    assert automaton.match == 2


@pytest.mark.parametrize("piece", [2, 5, 64])
def test_pieces_give_the_same_automaton_as_the_whole(piece: int) -> None:
    text, whole, pieces = random_text(2, 129, 0), SuffixAutomaton(), SuffixAutomaton()
    whole.extend(text)
    for start in range(0, len(text), piece):
        pieces.extend(text[start : start + piece])
    assert vars(pieces) == vars(whole)


def test_an_empty_text_has_no_match() -> None:
    assert SuffixAutomaton().match == 0


def test_counts_stop_where_repeats_nest_too_deep() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([3] * 101)
    assert automaton.lengths[automaton.match] == 100
    for state in range(1, len(automaton.links)):
        occurrences = 101 - automaton.lengths[state] + 1
        assert automaton.counts[state] == min(occurrences, MAX_COUNTED)
