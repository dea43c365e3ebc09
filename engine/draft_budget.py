"""DraftBudget: how many drafts are worth their time in a step, over all sequences at once.

Knows chances and step times; not how drafts are made, verified or scheduled.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from headway.engine.draft_chances import DraftChances
from headway.engine.sequence import Sequence
from headway.engine.step_times import StepTimes, nudge
from headway.engine.tree import DraftTree, num_drafted

_ALLOWANCE = 0.01
_FIRST_PLAIN_STEPS = 0.5
_MOST_PLAIN_STEPS = 16.0


class DraftBudget:
    """Keeps of the proposed trees what makes expected tokens a second highest.

    After the scheduler of DSpark (arXiv 2607.05147, 2026): every sequence emits one token anyway, and
    a draft one more with the chance that it survives. Drafts of all sequences are sorted by that
    chance, so a parent comes before its children, and of all beginnings of that list the one with the
    highest (sequences + sum of chances) / (T(rows) + other time) stays. The empty one, plain decoding,
    is among them.

    Example, two sequences, T(n) = 5 + n / 2 ms, other time 1 ms, chances 0.9, 0.5 and, below it, 0.2:

        drafts             0        1        2        3
        expected tokens    2        2.9      3.4      3.6
        milliseconds       7        7.5      8        8.5
        tokens a second    286      387      425      424        two drafts stay

    Chances may be wrong, so there is a purse of seconds. A step with drafts pays into it what accepted
    drafts saved, and takes what drafting and the extra rows cost; every step pays in 1 % of a plain one.
    While the purse is empty nothing is drafted: drafts lose less than 2 % against plain decoding,
    whatever the drafter and the text, and what becomes predictable is still noticed.
    """

    def __init__(self, times: StepTimes | None = None) -> None:
        self.times = times or StepTimes()
        self._chances = DraftChances()
        self._other_seconds = 0.0
        """Typical time of a step outside model and drafter."""
        self._draft_seconds = 0.0
        """Typical time of the drafter for one sequence."""
        self._purse_seconds: float | None = None
        """None until the first step."""
        self._was_asked = False

    @property
    def allows_drafts(self) -> bool:
        """Whether the drafter may be asked in this step."""
        return self._purse_seconds is None or self._purse_seconds >= 0.0

    def prune(
        self, sequences: Seq[Sequence], trees: Seq[DraftTree], num_rows: int
    ) -> list[DraftTree]:
        """Keep the best nodes of the trees, one for each sequence; num_rows: rows without drafts."""
        self._was_asked = True
        drafts = sorted(
            (-survival, index, node)
            for index, (sequence, tree) in enumerate(zip(sequences, trees, strict=True))
            if tree.num_drafted
            for node, survival in enumerate(self._chances.survivals(sequence, tree))
            if node
        )
        overhead = self._other_seconds + self._draft_seconds * len(sequences)
        expected = float(len(sequences))
        best_rate = expected / (self.times.seconds(num_rows) + overhead)
        num_kept = 0
        for num_drafts, (negative, _, _) in enumerate(drafts, 1):
            expected -= negative
            rate = expected / (self.times.seconds(num_rows + num_drafts) + overhead)
            if rate > best_rate:
                best_rate, num_kept = rate, num_drafts
        kept: list[list[int]] = [[0] for _ in trees]
        for _, index, node in drafts[:num_kept]:
            kept[index].append(node)
        return [tree.keep(sorted(nodes)) for tree, nodes in zip(trees, kept, strict=True)]

    def settle(
        self,
        sequences: Seq[Sequence],
        trees: Seq[DraftTree],
        paths: Iterable[Seq[int]],
        num_rows: int,
        draft_seconds: float,
        other_seconds: float,
    ) -> None:
        """Learn what became of a step: `paths` are the accepted ones of `trees`; num_rows as above."""
        num_accepted = 0
        for sequence, tree, path in zip(sequences, trees, paths, strict=True):
            self._chances.learn(sequence, tree, path)
            num_accepted += len(path) - 1
        self._other_seconds = nudge(self._other_seconds, other_seconds)
        plain = self.times.seconds(len(sequences)) + self._other_seconds
        if self._purse_seconds is None:
            self._purse_seconds = _FIRST_PLAIN_STEPS * plain
        gain = _ALLOWANCE * plain
        if self._was_asked:
            self._was_asked = False
            self._draft_seconds = nudge(self._draft_seconds, draft_seconds / len(sequences))
            num_drafts = num_drafted(trees)
            gain += num_accepted * plain / len(sequences)
            gain -= self._draft_seconds * len(sequences)
            gain -= self.times.seconds(num_rows + num_drafts) - self.times.seconds(num_rows)
        self._purse_seconds = min(_MOST_PLAIN_STEPS * plain, self._purse_seconds + gain)
