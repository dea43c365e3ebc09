"""The tiny model as a folder on disk, with a tokenizer of one token a byte and a chat template."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny import EOS_ID, tiny_model

SPECIAL = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = len(SPECIAL) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer without merges: byte b in GPT-2's alphabet, after three marks."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[EOS_ID],
        chat_template=chat_template,
    )


def save_tiny_folder(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the tiny model and its tokenizer as a Hugging Face folder and return it."""
    tiny_model(vocab_size=VOCAB_SIZE).save_pretrained(folder)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder
