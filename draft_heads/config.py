"""The settings of draft heads: HydraConfig, what they are; HeadsTrainConfig, how to train them.

Each docstring under a field of HeadsTrainConfig is its help text on the command line.
"""

from dataclasses import dataclass
from typing import Literal

from headway.draft_heads.tree_shape import EIGHT_NODES, TreeShape
from headway.engine.config import Dtype
from headway.engine.errors import UsageError
from headway.engine.models.store import DEFAULT_MODEL

Loss = Literal["hard", "soft"]
TreeName = Literal["chain", "eight"]

MIN_DRAFT_VOCAB = 16
"""Room for the tokens that end an answer, and for all ranks of a tree."""


@dataclass(frozen=True, slots=True)
class HydraConfig:
    """The shape of plain Hydra heads. Raises ValueError where it cannot be built."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    tree: TreeShape
    own_output_heads: bool = False
    """Whether each head has a vocabulary projection of its own, as published."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; at least 1 is needed")
        if not 1 <= self.tree.num_levels <= self.num_heads:
            raise ValueError(
                f"tree: is {self.tree.num_levels} levels deep; num_heads = {self.num_heads} heads "
                f"draft 1 to {self.num_heads} levels; train more heads or take a shallower tree"
            )
        if self.tree.width > self.vocab_size:
            raise ValueError(f"tree: ranks reach beyond the vocabulary of {self.vocab_size}")


@dataclass(frozen=True, slots=True)
class HeadsTrainConfig:
    """Train draft heads for a model on a file of chats."""

    data: str
    """JSONL file, a chat a line: {"messages": [...]}, {"conversations": [...]} or {"text": ...}."""
    out: str
    """Folder to write the heads to; it may not hold heads yet."""
    model: str = DEFAULT_MODEL
    """The target model: a name, a Hugging Face folder or a GGUF file."""
    num_heads: int = 4
    """Heads, and so the deepest draft."""
    tree: TreeName = "chain"
    """Tree that is drafted: a chain of one node a head, or eight nodes on five levels."""
    draft_vocab_size: int = 8192
    """Draft only this many tokens, those that the answers use most; 0 drafts any. Fewer cost less."""
    own_output_heads: bool = False
    """Give each head a vocabulary projection of its own, as published: far larger heads."""
    epochs: int = 3
    """Passes over the data."""
    max_steps: int = 0
    """Stop after this many steps; 0 leaves it to the epochs."""
    batch_tokens: int = 4096
    """Tokens of one step, padding included."""
    max_chat_tokens: int = 1024
    """Longer chats are cut here."""
    learning_rate: float = 1e-3
    """Peak of the schedule, for inputs of unit size; larger inputs get smaller steps."""
    weight_decay: float = 0.01
    """Decay of AdamW."""
    warmup_ratio: float = 0.04
    """Part of the steps in which the learning rate rises; then it falls as a cosine to a tenth."""
    loss: Loss = "hard"
    """Learn the tokens of the text (hard) or the model's distribution over them (soft)."""
    seed: int = 0
    """Decides the split and the order of the chats."""
    eval_fraction: float = 0.05
    """Part of the chats that is held out to measure acceptance; one chat at least."""
    eval_interval_steps: int = 200
    """Steps between two measurements; the heads with the best tau are kept."""
    dtype: Dtype = "auto"
    """Type of the target model; the heads are trained in float32."""
    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1; auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        problems = [f"{name}: got {got}; {allowed}" for name, got, allowed in self._bad_fields()]
        if problems:
            raise UsageError("; ".join(problems))

    def _bad_fields(self) -> list[tuple[str, object, str]]:
        least = {
            "num_heads": 1 if self.tree == "chain" else EIGHT_NODES.num_levels,
            "epochs": 1,
            "max_steps": 0,
            "max_chat_tokens": 4,
            "batch_tokens": self.max_chat_tokens,
            "eval_interval_steps": 1,
        }
        bad: list[tuple[str, object, str]] = [
            (name, getattr(self, name), f"at least {low} is needed")
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        if self.draft_vocab_size and self.draft_vocab_size < MIN_DRAFT_VOCAB:
            allowed = f"0 or at least {MIN_DRAFT_VOCAB}"
            bad.append(("draft_vocab_size", self.draft_vocab_size, allowed))
        if not 0 < self.learning_rate < 1:
            bad.append(("learning_rate", self.learning_rate, "between 0 and 1"))
        if not 0 <= self.weight_decay < 1:
            bad.append(("weight_decay", self.weight_decay, "from 0 up to 1"))
        if not 0 <= self.warmup_ratio < 1:
            bad.append(("warmup_ratio", self.warmup_ratio, "from 0 up to 1"))
        if not 0 < self.eval_fraction < 1:
            bad.append(("eval_fraction", self.eval_fraction, "between 0 and 1"))
        return bad

    def tree_shape(self) -> TreeShape:
        """Make the tree that `tree` names."""
        return TreeShape.chain(self.num_heads) if self.tree == "chain" else EIGHT_NODES
