"""DraftChances: how likely drafts are to be accepted, learnt from those that were and were not.

Knows trees and accepted paths; nothing of time.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from headway.engine.config import MAX_NODES
from headway.engine.sequence import Sequence
from headway.engine.tree import DraftTree

_UNKNOWN = 0.5
_SURE = 0.99
_COMMON_RATE = 0.02
_LUCK_RATE = 0.2
_LUCK_MEMORY = 0.98


class DraftChances:
    """Corrects what a drafter says of its drafts by what became of earlier ones.

    Given that its parent was accepted, a node is accepted with the chance

        sigmoid(slope * logit(estimate) + bias[depth] + luck[sequence])

    where `estimate` is the drafter's; one without estimates is taken to say 1/2 for a first child, 1/4
    for a second and so on. Slope and biases belong to the engine, luck to the sequence. All move by
    gradient steps of the log loss, as in Platt, "Probabilistic Outputs for Support Vector Machines"
    (1999), but online, so that old text is forgotten; luck moves ten times as fast. A step in which
    no draft of a sequence is verified brings its luck 2 % nearer to 0: what is not tried is not known,
    so after a while it is tried again.

    Example: a drafter always says 0.6 and the depth's bias is 0. After five rejections of first drafts
    a sequence's luck is -0.54, and the chance 0.45; one acceptance makes it 0.48.
    """

    def __init__(self) -> None:
        self._slope = 1.0
        self._biases = [0.0] * (MAX_NODES + 1)

    def survivals(self, sequence: Sequence, tree: DraftTree) -> list[float]:
        """The chance of each node that it is accepted with all above it; 1 for the root."""
        survivals = [1.0]
        for node, evidence in enumerate(_evidence(tree), 1):
            parent, depth = tree.parents[node], tree.depths[node]
            score = self._slope * evidence + self._biases[depth] + sequence.draft_luck
            survivals.append(survivals[parent] * _sigmoid(score))
        return survivals

    def learn(self, sequence: Sequence, tree: DraftTree, path: Iterable[int]) -> None:
        """Take note of which nodes of a verified tree are its accepted path, the root first."""
        if not tree.num_drafted:
            sequence.draft_luck *= _LUCK_MEMORY
            return
        accepted = set(path)
        for node, evidence in enumerate(_evidence(tree), 1):
            if tree.parents[node] not in accepted:
                continue
            depth = tree.depths[node]
            score = self._slope * evidence + self._biases[depth] + sequence.draft_luck
            error = (node in accepted) - _sigmoid(score)
            slope = self._slope + _COMMON_RATE * error * evidence
            self._slope = max(0.2, min(3.0, slope))
            self._biases[depth] += _COMMON_RATE * error
            sequence.draft_luck += _LUCK_RATE * error


def _evidence(tree: DraftTree) -> list[float]:
    """The log odds that the drafter gives each draft, its parent being right; the root has none."""
    if tree.survivals is None:
        return [_logit(chance) for chance in _unknown_chances(tree.parents)]
    survivals = tree.survivals
    return [
        _logit(survivals[node] / (survivals[tree.parents[node]] or 1.0))
        for node in range(1, len(survivals))
    ]


def _unknown_chances(parents: Seq[int]) -> list[float]:
    """Half of what older siblings leave, for each draft."""
    newest: dict[int, float] = {}
    chances = []
    for parent in parents[1:]:
        newest[parent] = newest.get(parent, 1.0) * _UNKNOWN
        chances.append(newest[parent])
    return chances


def _logit(chance: float) -> float:
    chance = max(1 - _SURE, min(_SURE, chance))
    return math.log(chance / (1 - chance))


def _sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score)) if score > -30.0 else 0.0
