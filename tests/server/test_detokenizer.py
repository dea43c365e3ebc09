"""Text that grows: whole characters only, nothing twice, stop strings wherever tokens are cut."""

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fake_engine import EOS_ID, byte_tokenizer
from headway.engine.errors import ModelLoadError
from headway.server.detokenizer import Detokenizer, TokenBytes
from headway.server.stop_strings import StopFinder

TOKENIZER = byte_tokenizer()
TOKEN_BYTES = TokenBytes(TOKENIZER)
PEPPER = list("\N{HOT PEPPER}".encode())  # byte i is token i


def feed(detokenizer: Detokenizer, chunks: Sequence[Sequence[int]]) -> tuple[str, list[int]]:
    """Return the whole text and how many tokens each push and the end settled."""
    pieces = [detokenizer.push(chunk) for chunk in chunks] + [detokenizer.finish()]
    return "".join(p.text for p in pieces), [p.num_tokens for p in pieces]


def random_chunks(rng: random.Random, ids: list[int]) -> list[list[int]]:
    cuts = sorted(rng.sample(range(len(ids) + 1), rng.randint(0, min(len(ids), 9))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def test_any_chunking_gives_what_decoding_at_once_gives() -> None:
    rng = random.Random(7)
    for _ in range(300):
        ids = [
            rng.choice([*range(EOS_ID + 1), *PEPPER, *PEPPER]) for _ in range(rng.randint(1, 40))
        ]
        chunks = random_chunks(rng, ids)
        text, counts = feed(Detokenizer(TOKEN_BYTES), chunks)
        assert text == TOKENIZER.decode(ids, skip_special_tokens=True)
        assert sum(counts) == len(ids)


def test_any_chunking_finds_the_same_stop_string_at_the_same_token() -> None:
    rng = random.Random(11)
    for _ in range(300):
        ids = [rng.choice(b"abc") for _ in range(30)]
        stops = ["".join(rng.choices("abc", k=rng.randint(2, 4))) for _ in range(3)]
        whole = Detokenizer(TOKEN_BYTES, stop_strings=stops)
        expected, _ = feed(whole, [ids])
        text = bytes(ids).decode()
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert whole.num_tokens == min(ends, default=len(ids))
        if ends:
            assert text[: min(ends)] == expected + str(whole.stop_string)
        for _ in range(3):
            cut = Detokenizer(TOKEN_BYTES, stop_strings=stops)
            assert feed(cut, random_chunks(rng, ids))[0] == expected
            assert (cut.stop_string, cut.num_tokens) == (whole.stop_string, whole.num_tokens)


def test_a_character_waits_for_its_last_byte_and_its_tokens_wait_with_it() -> None:
    detokenizer = Detokenizer(TOKEN_BYTES)
    pieces = [detokenizer.push([i]) for i in [ord("x"), *PEPPER, ord("y")]]
    assert [p.text for p in pieces] == ["x", "", "", "", "\N{HOT PEPPER}", "y"]
    assert [p.num_tokens for p in pieces] == [1, 0, 0, 0, 4, 1]


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        ([0xF0, 0x9F], "\ufffd"),
        ([0x80, 0x80, ord("a")], "\ufffd\ufffda"),
        ([0xF0, 0x9F, ord("a"), 0xC3, 0xA9], "\ufffda\xe9"),
        ([0xF0, *PEPPER], "\ufffd\N{HOT PEPPER}"),
    ],
)
def test_invalid_bytes_never_stop_the_stream(token_ids: list[int], text: str) -> None:
    """vllm#17448: byte tokens that are no UTF-8 killed the output handler."""
    assert feed(Detokenizer(TOKEN_BYTES), [[i] for i in token_ids])[0] == text


def test_prompt_that_ends_within_a_character_is_never_given_out_again() -> None:
    """vllm#48853: the first delta held the whole prompt."""
    prompt = [*b"Hello world ", *PEPPER[:3]]
    completed = Detokenizer(TOKEN_BYTES, prompt)
    assert completed.push([PEPPER[3]]).text == "\N{HOT PEPPER}"
    left = Detokenizer(TOKEN_BYTES, prompt)
    assert feed(left, [[ord("a")], [ord("b")]])[0] == "ab"
    assert feed(Detokenizer(TOKEN_BYTES, prompt), [[EOS_ID]]) == ("", [0, 1])


def test_stop_string_over_token_borders_leaks_nothing() -> None:
    """vllm#3574: alphabet, stop DEFGHIJ, tokens DEF | G | HI | J."""
    ids = TOKENIZER.encode("ABCDEFGHIJKLM")
    assert [TOKENIZER.decode([i]) for i in ids[3:7]] == ["DEF", "G", "HI", "J"]
    detokenizer = Detokenizer(TOKEN_BYTES, stop_strings=["DEFGHIJ"])
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(p.text for p in pieces) == "ABC"
    assert detokenizer.stop_string == "DEFGHIJ"
    assert detokenizer.num_tokens == sum(p.num_tokens for p in pieces) == 7


@pytest.mark.parametrize(
    ("stops", "options", "text", "stop"),
    [
        (["cd"], {}, "ab", "cd"),
        (["cd"], {"include_stop": True}, "abcd", "cd"),
        (["bcde", "c"], {}, "ab", "c"),
        (["bc", "abc"], {}, "", "abc"),
        (["zz"], {}, "abcdefabcdef", None),
        (["f\n"], {}, "abcdefabcdef", None),
        (["ab"], {"min_new_tokens": 3}, "abcdef", "ab"),
    ],
)
def test_stop_rules(
    stops: list[str], options: dict[str, bool], text: str, stop: str | None
) -> None:
    detokenizer = Detokenizer(TOKEN_BYTES, stop_strings=stops, **options)
    assert feed(detokenizer, [[i] for i in b"abcdefabcdef"])[0] == text
    assert detokenizer.stop_string == stop


def test_held_back_text_is_the_shortest_that_could_become_a_stop_string() -> None:
    finder = StopFinder(["DEFG", "FX"])
    held = []
    for char in "ABDEFXDEDE":
        finder.feed(char, armed=False)
        held.append(finder.num_held)
    assert held == [0, 0, 1, 2, 3, 0, 1, 2, 1, 2]


def test_special_tokens_are_hidden_or_shown() -> None:
    ids = [ord("a"), EOS_ID]
    assert feed(Detokenizer(TOKEN_BYTES), [ids])[0] == "a"
    shown = Detokenizer(TOKEN_BYTES, skip_special_tokens=False)
    assert feed(shown, [ids])[0] == "a<|im_end|>"


def test_sentencepiece_pieces_and_byte_fallback() -> None:
    vocab = {"\u2581Hi": 0, "\u2581there": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4, "!": 5}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = [0, 1, 2, 3, 4, 5]
    text, _ = feed(Detokenizer(TokenBytes(fast)), [[i] for i in ids])
    assert text == fast.decode(ids) == " Hi there\u20ac!"


def test_an_id_without_a_piece_adds_nothing() -> None:
    assert feed(Detokenizer(TOKEN_BYTES), [[ord("a"), 300, ord("b")]])[0] == "ab"


def test_other_decoders_are_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_long_invalid_runs_cost_linear_time() -> None:
    detokenizer = Detokenizer(TOKEN_BYTES)
    text = "".join(detokenizer.push([0x80]).text for _ in range(20_000))
    assert text == "\ufffd" * 20_000
