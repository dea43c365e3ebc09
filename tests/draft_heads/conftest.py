"""A tokenizer of one word a token, and heads with random weights, for the tiny model."""

from collections.abc import Callable, Sequence

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from headway.draft_heads.config import HydraConfig
from headway.draft_heads.hydra import HydraHeads, TargetEnds
from headway.draft_heads.tree_shape import TreeShape
from tiny import EOS_ID, VOCAB_SIZE, tiny_model

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<u> ' if m['role'] == 'user' else '<a> ' }}{{ m['content'] }} <end> <nl> "
    "{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Ids: <end> 2 (end of sequence), <u> 3, <a> 4, <nl> 5, w6 .. w63 themselves."""
    words = [
        "<pad>",
        "<bos>",
        "<end>",
        "<u>",
        "<a>",
        "<nl>",
        *(f"w{i}" for i in range(6, VOCAB_SIZE)),
    ]
    plain = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<pad>")
    assert wrapped.eos_token_id == EOS_ID
    wrapped.chat_template = TEMPLATE
    return wrapped


@pytest.fixture
def make_heads(model: LlamaForCausalLM) -> Callable[..., HydraHeads]:
    """Heads for the tiny model, every weight random, so that no zero hides a term."""

    def make(
        num_heads: int = 4,
        tree: TreeShape | None = None,
        *,
        own_output_heads: bool = False,
        draft_ids: Sequence[int] | None = None,
        target: LlamaForCausalLM = model,
    ) -> HydraHeads:
        shape = tree or TreeShape.chain(num_heads)
        config = HydraConfig(32, VOCAB_SIZE, num_heads, shape, own_output_heads)
        ids = None if draft_ids is None else torch.tensor(draft_ids)
        heads = HydraHeads(config, TargetEnds.of(target), ids).requires_grad_(False)
        generator = torch.Generator().manual_seed(7)
        for parameter in heads.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        return heads

    return make
