"""A model with weights written by hand that recites a text, the truth about it, and a drafter that knows it.

The model needs its cache: the next token depends on the last one and, through attention, on the one
before. So a key or value in the wrong slot shows in the text. Truth is worked out from the
tables and tests/sampling_reference.py alone, never by running a model.
"""

import threading
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

import torch
from transformers import LlamaForCausalLM

from fake_engine import EOS_ID
from headway.engine.noise import gumbel
from headway.engine.request import Request
from headway.engine.sequence import Sequence
from headway.engine.tree import Commit, DraftTree
from sampling_reference import grow, law, shape
from tiny import tiny_config

VOCAB_SIZE = 261
HEAD_SIZE = 264
ROPE_THETA = 100.0
FULL_DRAFT = 12


class Recital:
    """Logits after (..., prev, last) are by_last[last] + by_prev[prev]; see `model` for how.

    Both tables hold noise of variance 1, and `strength` more where `text` goes on in this way: at 6 the
    model recites the text; at 3 it wanders through it, and off it.
    """

    def __init__(self, text: Seq[int], strength: float = 6.0) -> None:
        noise = torch.randn(2, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
        self.by_last, self.by_prev = noise
        for prev, last, following in zip([text[0], *text], text, text[1:], strict=False):
            self.by_last[last, following] += strength
            self.by_prev[prev, following] += strength
        self._answers: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    @cache  # noqa: B019 - a recital lives as long as its module's tests
    def model(self, max_context_tokens: int = 512) -> LlamaForCausalLM:
        """One layer with one head that looks one token back, and no MLP.

        The residual stream [528] holds one-hot(last) at 0, a constant 1 at 261 and, put there by the head,
        one-hot(prev) at 264. The constant makes all queries alike and all keys alike, so that
        scores depend on the distance: sum_i cos((distance - 1) theta_i), highest at 1.
        """
        model = LlamaForCausalLM(
            tiny_config(
                vocab_size=VOCAB_SIZE,
                hidden_size=2 * HEAD_SIZE,
                head_dim=HEAD_SIZE,
                intermediate_size=2,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                max_position_embeddings=max_context_tokens,
                rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
                rms_norm_eps=1e-12,
                eos_token_id=EOS_ID,
            )
        ).requires_grad_(False)
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        one_hot = torch.eye(VOCAB_SIZE)
        early = (2 * HEAD_SIZE / 2) ** 0.5  # what the norms multiply two ones by, and three
        late = (2 * HEAD_SIZE / 3) ** 0.5
        half = HEAD_SIZE // 2
        theta = ROPE_THETA ** (-torch.arange(half) / half)
        sharpness = 5.0 * HEAD_SIZE**0.5
        embedding, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
        embedding[:, :VOCAB_SIZE] = one_hot
        embedding[:, VOCAB_SIZE] = 1.0
        attention.k_proj.weight[:half, VOCAB_SIZE] = 1.0 / early
        attention.q_proj.weight[:half, VOCAB_SIZE] = sharpness * theta.cos() / early
        attention.q_proj.weight[half:, VOCAB_SIZE] = -sharpness * theta.sin() / early
        attention.v_proj.weight[:VOCAB_SIZE, :VOCAB_SIZE] = one_hot / early
        attention.o_proj.weight[HEAD_SIZE : HEAD_SIZE + VOCAB_SIZE, :VOCAB_SIZE] = one_hot
        model.lm_head.weight[:, :VOCAB_SIZE] = self.by_last.T / late
        model.lm_head.weight[:, HEAD_SIZE : HEAD_SIZE + VOCAB_SIZE] = self.by_prev.T / late
        model.eval()  # type: ignore[no-untyped-call] # of torch
        return model

    def logits(self, tokens: Seq[int]) -> torch.Tensor:
        """What the model says after `tokens`: [V] float32. The first token is its own prev."""
        logits: torch.Tensor = (
            self.by_last[tokens[-1]] + self.by_prev[tokens[max(0, len(tokens) - 2)]]
        )
        return logits

    def answer(self, request: Request, num_tokens: int) -> list[int]:
        """The first tokens that the law of a request draws after its prompt, past any end.

        Any thread may ask; what was worked out once is kept.
        """
        stopping = request.stopping
        sampling = replace(request.sampling, logit_bias=dict(request.sampling.logit_bias))
        shaped_by = (request.prompt_ids, sampling, stopping.min_new_tokens, stopping.stop_token_ids)
        with self._lock:
            known = self._answers.setdefault(repr(shaped_by), [])
            sequence = Sequence(request, arrived=0.0)
            grow(sequence, known)
            while len(known) < num_tokens:
                known.append(_draw(self.logits(sequence.tokens).tolist(), sequence))
                grow(sequence, known[-1:])
            return known[:num_tokens]


def _draw(logits: list[float], sequence: Sequence) -> int:
    sampling = sequence.request.sampling
    if sampling.temperature == 0:
        scores = shape(logits, sequence, (EOS_ID,))
        return scores.index(max(scores))
    p = torch.tensor(law(logits, sequence, (EOS_ID,)), dtype=torch.float64)
    position = len(sequence.tokens)
    noise = gumbel([sampling.seed], [position], len(p), torch.device("cpu"))[0]
    return int((p.log() + noise).argmax())


class KnowingDrafter:
    """Drafts what the recital will say, past any end, so that runs as long as can be are accepted.

    With room for FULL_DRAFT nodes every right one has a wrong sibling before it, so that accepted keys and
    values must move; with less it is one chain:

        root -> wrong, right;  right -> wrong, right; ...          root -> right -> right -> ...
    """

    name = "knowing"
    needs_hidden = False

    def __init__(self, recital: Recital) -> None:
        self._recital = recital

    def propose(self, sequences: Seq[Sequence], max_drafted: Seq[int]) -> list[DraftTree]:
        return [self._tree(*each) for each in zip(sequences, max_drafted, strict=True)]

    def _tree(self, sequence: Sequence, max_drafted: int) -> DraftTree:
        start = sequence.num_generated
        right = self._recital.answer(sequence.request, start + max_drafted)[start:]
        if max_drafted < FULL_DRAFT:
            return DraftTree.chain(sequence.tokens[-1], right)
        tokens, parents = [sequence.tokens[-1]], [-1]
        for depth, token in enumerate(right[: FULL_DRAFT // 2]):
            tokens += [(token + 1) % VOCAB_SIZE, token]
            parents += [2 * depth, 2 * depth]
        return DraftTree(tuple(tokens), tuple(parents))

    def observe(self, commits: Seq[Commit]) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass
