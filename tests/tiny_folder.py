"""The tiny model as a folder on disk, with a tokenizer of bytes and a chat template."""

import copy
from pathlib import Path

from fake_engine import EOS_ID, byte_tokenizer
from tiny import tiny_model

VOCAB_SIZE = EOS_ID + 1
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_tiny_folder(folder: Path) -> Path:
    """Write the tiny model and its tokenizer as a Hugging Face folder and return it."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    # Seed 1: its greedy answers do not end soon, and come to repeat themselves.
    tiny_model(
        1, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID, bos_token_id=None, pad_token_id=None
    ).save_pretrained(folder)
    return folder
