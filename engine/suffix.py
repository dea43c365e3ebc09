"""SuffixDrafter: drafts what followed when the end of a sequence occurred before.

Learns nothing and needs no model. It pays where an answer copies its prompt or repeats itself.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import Literal, NamedTuple

from headway.engine.sequence import Sequence
from headway.engine.suffix_automaton import SuffixAutomaton
from headway.engine.tree import Commit, DraftTree


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """When the suffix drafter drafts, and how much.

    A match of one token is worth drafting from because min_survival keeps such drafts short.
    """

    min_match: int = 1
    """Draft only if at least this many last tokens occurred before."""
    branching: Literal["chain", "tree"] = "tree"
    """Follow only the most frequent continuation, or several where they differ."""
    max_depth: int = 16
    """Tokens drafted along one path at most."""
    min_survival: float = 0.15
    """Leave out drafts that are less likely than this to be accepted; 0 leaves out none."""
    max_indexed_tokens: int = 2048
    """Tokens added to the automata in one step, over all sequences; about 2 us each."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings with which nothing could be drafted."""
        for name in ("min_match", "max_depth", "max_indexed_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.min_survival <= 1:
            raise ValueError(f"min_survival is {self.min_survival}; it is a chance, from 0 to 1")


class SuffixDrafter:
    """Drafts from one suffix automaton per sequence, over its prompt and its answer.

    After Hu et al., "SAM Decoding" (2024), and Oliaro et al., "SuffixDecoding" (2024): candidates
    are grown best first by the chance that they survive verification, estimated as

        survival(node) = survival(parent) * length / (length + 1) * share

    where `length` is how many tokens before the node were matched and `share` is the node's part of
    the continuations counted there. Each node adds its token to the match, so along an undisputed
    path survival after d drafts is L / (L + d), L being the match at the root: the draft grows with
    the match, to at most L / min_survival - L tokens.

    Example, text 7 8 9 7 8 (its automaton is drawn in SuffixAutomaton), match 7 8, L = 2:

        draft      9     7     8     9     7     8
        survival  2/3   2/4   2/5   4/15  1/5   4/25      the next, 9, would have 8/75 < 0.15

    After the first three the text ends, so drafting goes on from its match, again with length 2: a
    text with a period is continued with that period.

    Costs 10 to 60 us a sequence and step. A long prompt is indexed over several steps of
    max_indexed_tokens, in which its sequence gets no drafts and shorter ones go first.
    """

    name = "suffix"
    needs_hidden = False

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config or SuffixConfig()
        self._automata: dict[str, SuffixAutomaton] = {}

    def propose(self, sequences: Seq[Sequence], max_drafted: Seq[int]) -> list[DraftTree]:
        """Draft for each sequence a tree of at most `max_drafted[i]` nodes under its root."""
        budgets = list(zip(sequences, max_drafted, strict=True))
        self._catch_up([sequence for sequence, num_drafts in budgets if num_drafts > 0])
        return [self._draft(sequence, num_drafts) for sequence, num_drafts in budgets]

    def observe(self, commits: Seq[Commit]) -> None:
        """Do nothing: `propose` reads new tokens from the sequences."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the automaton; if the sequence comes back it is built anew."""
        self._automata.pop(sequence.request.request_id, None)

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Add the tokens not yet seen, those of the sequences with fewest first."""
        for sequence in sequences:
            self._automata.setdefault(sequence.request.request_id, SuffixAutomaton())
        room = self.config.max_indexed_tokens
        for sequence in sorted(sequences, key=self._num_unseen):
            automaton = self._automata[sequence.request.request_id]
            unseen = sequence.tokens[automaton.num_tokens : automaton.num_tokens + room]
            automaton.extend(unseen)
            room -= len(unseen)

    def _num_unseen(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self._automata[sequence.request.request_id].num_tokens

    def _draft(self, sequence: Sequence, max_drafted: int) -> DraftTree:
        root_id = sequence.tokens[-1]
        if max_drafted <= 0 or self._num_unseen(sequence) > 0:
            return DraftTree.root_only(root_id)
        automaton = self._automata[sequence.request.request_id]
        return grow_tree(automaton, root_id, max_drafted, self.config)


class Candidate(NamedTuple):
    """A token that may come next. Sorts by survival, then by age of its parent, then by rank."""

    negative_survival: float
    parent: int
    """Index among the nodes taken so far; -1 for the root."""
    rank: int
    """Place among its siblings."""
    token_id: int
    depth: int
    state: int
    """The automaton's state after this token."""
    match_length: int
    """Tokens matched, this one included."""


def grow_tree(
    automaton: SuffixAutomaton, root_id: int, max_drafted: int, config: SuffixConfig
) -> DraftTree:
    """Take the candidates that are likeliest to survive until `max_drafted` are drafted."""
    match = automaton.match
    frontier = [Candidate(-1.0, -1, 0, root_id, 0, match, automaton.lengths[match])]
    nodes: list[Candidate] = []
    while frontier and len(nodes) <= max_drafted:
        nodes.append(heappop(frontier))
        for candidate in candidates_after(nodes, automaton, config):
            heappush(frontier, candidate)
    return breadth_first(nodes)


def candidates_after(
    nodes: Seq[Candidate], automaton: SuffixAutomaton, config: SuffixConfig
) -> list[Candidate]:
    """List what came after the last of `nodes`: most frequent first, latest found among equals."""
    node = nodes[-1]
    state, length = node.state, node.match_length
    if not automaton.transitions[state]:  # The text ends here; go on from its match.
        state = automaton.match
        length = automaton.lengths[state]
    if length < config.min_match or node.depth == config.max_depth:
        return []
    targets, counts = automaton.transitions[state], automaton.counts
    num_seen = sum(counts[target] for target in targets.values())
    scale = node.negative_survival * length / (length + 1) / num_seen
    likely = [
        (scale * counts[target], token_id, target)
        for token_id, target in reversed(targets.items())  # Latest first; the sort is stable.
        if -scale * counts[target] >= config.min_survival
    ]
    likely.sort(key=itemgetter(0))
    return [
        Candidate(negative, len(nodes) - 1, rank, token_id, node.depth + 1, target, length + 1)
        for rank, (negative, token_id, target) in enumerate(likely)
        if rank == 0 or config.branching == "tree"
    ]


def breadth_first(nodes: Seq[Candidate]) -> DraftTree:
    """Order nodes, each after its parent, by depth."""
    order = sorted(range(len(nodes)), key=lambda index: nodes[index].depth)
    places = {index: place for place, index in enumerate(order)} | {-1: -1}
    return DraftTree(
        tuple(nodes[index].token_id for index in order),
        tuple(places[nodes[index].parent] for index in order),
        tuple(-nodes[index].negative_survival for index in order),
    )
