"""The tokens that heads may propose: how they are chosen, kept and found in the model's output head.

Knows nothing of heads. A vocabulary is its token ids, ascending, [D] int64: output number p of the
heads stands for token draft_ids[p]. None stands for all tokens.

Example, draft_ids 2 5 9 of a model of 64 tokens: a head has 3 outputs, the second is token 5, and a
label 6 has no place: it is not learnt, and never drafted.
"""

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from headway.draft_heads.data import IGNORED, Example
from headway.engine.models.packed_modules import PackedLinear
from headway.kernels.pack import take_outputs


def most_frequent(
    examples: Iterable[Example], num_tokens: int, always: Collection[int], vocab_size: int
) -> Tensor | None:
    """Choose the tokens that are learnt most often, those of `always` before all others.

    Among equals, also where the text has too few, lower ids come first: a tokenizer numbers what it
    merged early, and so often saw, low. Returns None where `num_tokens` is 0 or leaves nothing out.
    """
    if not 0 < num_tokens < vocab_size:
        return None
    counts = Counter(token for example in examples for token in learnt_tokens(example))
    order = sorted(range(vocab_size), key=lambda token: (token not in always, -counts[token]))
    return torch.tensor(sorted(order[:num_tokens]))


def coverage(draft_ids: Tensor | None, examples: Iterable[Example]) -> float:
    """Return the share of the learnt tokens that can be drafted."""
    tokens = [token for example in examples for token in learnt_tokens(example)]
    if draft_ids is None or not tokens:
        return 1.0
    return float(torch.isin(torch.tensor(tokens), draft_ids.cpu()).double().mean())


def learnt_tokens(example: Example) -> list[int]:
    """List what of a chat the model itself writes."""
    return [token for token, learnt in zip(example.ids, example.learnt, strict=True) if learnt]


def check_draft_ids(draft_ids: Tensor, vocab_size: int, num_ranks: int) -> None:
    """Raise ValueError unless this is a vocabulary of which `num_ranks` tokens can be ranked."""
    if draft_ids.dtype != torch.int64 or draft_ids.dim() != 1:
        problem = f"is {draft_ids.dtype} {tuple(draft_ids.shape)}, not a row of int64"
    elif len(draft_ids) < num_ranks:
        problem = f"has {len(draft_ids)} tokens; the tree tries {num_ranks} under a node"
    elif int(draft_ids.min()) < 0 or int(draft_ids.max()) >= vocab_size:
        problem = (
            f"has ids from {int(draft_ids.min())} to {int(draft_ids.max())}; the model's tokens "
            f"are 0 to {vocab_size - 1}"
        )
    elif (falls := (draft_ids.diff() <= 0).nonzero()).numel():
        at = int(falls[0])
        first, second = draft_ids[at : at + 2].tolist()
        problem = f"has {second} after {first} at place {at + 1}; ids must ascend, none twice"
    else:
        return
    raise ValueError(f"draft_ids: {problem}")


def places_of(labels: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Turn labels, token ids or IGNORED, into numbers of outputs: IGNORED where there is none."""
    if draft_ids is None:
        return labels
    places = torch.searchsorted(draft_ids, labels.contiguous()).clamp(max=len(draft_ids) - 1)
    return torch.where(draft_ids[places] == labels, places, IGNORED)


def narrowed(head: nn.Module, draft_ids: Tensor) -> nn.Module:
    """Copy an output head with the outputs of some tokens alone, each as it was to the bit.

    Raises ValueError for a head of an unknown class.
    """
    if isinstance(head, PackedLinear):
        bias = None if head.bias is None else head.bias[draft_ids]
        return PackedLinear(take_outputs(head.weight, draft_ids), bias, head.activations)
    if type(head) is not nn.Linear:
        raise ValueError(
            f"draft_ids: the model's output head is a {type(head).__name__}, of which no part can "
            "be taken; train heads with draft_vocab_size 0"
        )
    taken = nn.Linear(head.in_features, len(draft_ids), head.bias is not None, device="meta")
    taken.weight = nn.Parameter(head.weight.detach()[draft_ids], requires_grad=False)
    if head.bias is not None:
        taken.bias = nn.Parameter(head.bias.detach()[draft_ids], requires_grad=False)
    return taken
