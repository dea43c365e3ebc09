"""Public bug reports about what an answer says: its characters, its end, its law, its log probabilities.

Each row names a report and replays its trigger; the model recites the answer, and whole runs of it are
drafted and accepted. Rows are numbered as in the list of reports that Headway replays.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from fake_engine import EOS_ID
from headway.engine.build import build_engine
from headway.engine.loop import EngineLoop
from headway.engine.models.attention import ATTENTION
from headway.engine.models.load import load_model
from headway.engine.request import FinishReason
from headway.engine.suffix import SuffixDrafter
from headway.protos import text_generation_pb2 as pb
from loopback import running
from reciting import Recital
from replay import BATCH, OFF, ON, SPECULATION, Play, Stage, ask_for, check_gauges, stage
from tiny_engine import SMALL
from tiny_gguf import tiny_family, write_gguf

DEF, HI = 257, 258  # tokens of three and of two letters
PEPPER = "\N{HOT PEPPER}".encode()
HANGUL = "\N{HANGUL SYLLABLE HAN}\N{HANGUL SYLLABLE GEUL}"
VIETNAMESE = "ti\N{LATIN SMALL LETTER E WITH CIRCUMFLEX AND ACUTE}ng"
REASONS = {
    reason.name: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}


@dataclass(frozen=True)
class Said:
    """What the model goes on to say after a prompt, and what of it the client must get."""

    row: str
    recited: list[int]
    text: str
    num_tokens: int
    reason: str = "LENGTH"
    stop: int | str | None = None
    prompt: list[int] = field(default_factory=lambda: [*b"go:"])
    options: dict[str, Any] = field(default_factory=dict)
    num_steps: int | None = None
    """Passes with speculation, where the report is about one run of drafts."""

    @cached_property
    def recital(self) -> Recital:
        return Recital([*self.prompt, *self.recited])


ALPHABET = [65, 66, 67, DEF, 71, HI, 74, 75, 76]
LOST = "\N{REPLACEMENT CHARACTER}"
SAID = [
    Said(
        "row01-vllm-48853-prompt-ends-in-half-a-character",
        prompt=[*b"Hello world ", *PEPPER[:3]],
        recited=[*PEPPER[3:], *b"! hot"],
        text="\N{HOT PEPPER}! hot",
        num_tokens=6,
    ),
    Said(
        "row01-vllm-48853-half-character-left-alone",
        prompt=[*b"Hello world ", *PEPPER[:3]],
        recited=[*b"! hot"],
        text="! hot",
        num_tokens=5,
    ),
    Said(
        "row02-vllm-17448-invalid-utf8",
        recited=[0xF0, 0x9F, 0x80, *b"o", 0xFF, *b"k", 0xC3, *b"!", 0xED, 0x95],
        text=f"{LOST}o{LOST}k{LOST}!{LOST}",
        num_tokens=10,
    ),
    Said(
        "row02-vllm-17448-characters-of-three-tokens",
        recited=[*f"{HANGUL} {VIETNAMESE}.".encode()],
        text=f"{HANGUL} {VIETNAMESE}.",
        num_tokens=15,
    ),
    Said(
        "row03-vllm-3574-stop-string-in-pieces",
        recited=ALPHABET,
        options={"stop_strings": ["DEFGHIJ"]},
        text="ABC",
        num_tokens=7,
        reason="STOP_STRING",
        stop="DEFGHIJ",
    ),
    Said(
        "row03-vllm-3574-only-the-beginning-of-one",
        recited=[65, 66, 67, DEF, 71, HI, *b"xyz"],
        options={"stop_strings": ["DEFGHIJ"]},
        text="ABCDEFGHIxyz",
        num_tokens=9,
    ),
    Said(
        "row04-smg-2203-end-mark-while-text-is-held",
        recited=[*b"keep", EOS_ID],
        options={"stop_strings": ["ep|>", "p<|im_end|>"]},
        text="keep",
        num_tokens=5,
        reason="EOS",
        stop=EOS_ID,
    ),
    Said(
        "row04-smg-2203-mark-within-the-held-text",
        recited=[*b"ke", EOS_ID, *b"ep"],
        options={"stop_strings": ["e<|im_end|>", "eep|>"], "ignore_eos": True},
        text="keep",
        num_tokens=5,
    ),
    Said(
        "row05-vllm-57052-token-ids-end-with-the-stop-string",
        recited=ALPHABET,
        options={"stop_strings": ["DEFGHIJ"], "include_stop": False, "num_logprobs": 0},
        text="ABC",
        num_tokens=7,
        reason="STOP_STRING",
        stop="DEFGHIJ",
    ),
    Said(
        "row05-vllm-57052-and-include-it-when-asked",
        recited=ALPHABET,
        options={"stop_strings": ["DEFGHIJ"], "include_stop": True, "num_logprobs": 0},
        text="ABCDEFGHIJ",
        num_tokens=7,
        reason="STOP_STRING",
        stop="DEFGHIJ",
    ),
    Said(
        "row07-sglang-31599-end-third-in-a-run-of-six",
        recited=[*b"ab", EOS_ID, *b"junk"],
        options={"max_new_tokens": 7},
        text="ab",
        num_tokens=3,
        reason="EOS",
        stop=EOS_ID,
        num_steps=1,
    ),
    Said(
        "row07-sglang-31599-stop-token-third",
        recited=[*b"ab.junk"],
        options={"max_new_tokens": 7, "stop_token_ids": [*b"."]},
        text="ab",
        num_tokens=3,
        reason="STOP_TOKEN",
        stop=ord("."),
        num_steps=1,
    ),
    Said(
        "row07-sglang-31599-stop-string-third",
        recited=[*b"ab", DEF, *b"junk"],
        options={"max_new_tokens": 7, "stop_strings": ["bDE"]},
        text="a",
        num_tokens=3,
        reason="STOP_STRING",
        stop="bDE",
        num_steps=1,
    ),
    Said(
        "row08-vllm-56101-end-inside-the-accepted-run",
        recited=[*b"abcd", EOS_ID, *b"junk and more"],
        options={"max_new_tokens": 40},
        text="abcd",
        num_tokens=5,
        reason="EOS",
        stop=EOS_ID,
        num_steps=1,
    ),
    Said(
        "row17-sglang-39826-length-within-a-run",
        recited=[*b"abcdefghijkl"],
        options={"max_new_tokens": 10},
        text="abcdefghij",
        num_tokens=10,
    ),
    Said(
        "row17-vllm-30204-half-a-character-in-the-last-run",
        recited=[*b"ab", *HANGUL.encode()],
        options={"max_new_tokens": 4},
        text=f"ab{LOST}",
        num_tokens=4,
    ),
    Said(
        "row17-vllm-30204-stop-string-before-the-end-of-the-last-run",
        recited=[*b"abcdefghijkl"],
        options={"max_new_tokens": 10, "stop_strings": ["gh", "j"]},
        text="abcdef",
        num_tokens=8,
        reason="STOP_STRING",
        stop="gh",
    ),
]


@pytest.mark.parametrize("mode", SPECULATION)
@pytest.mark.parametrize("said", SAID, ids=lambda said: said.row)
async def test_recited(said: Said, mode: str) -> None:
    options = {"max_new_tokens": len(said.recited), **said.options}
    request = ask_for(said.prompt, **options)
    async with stage(mode, said.recital) as played:
        answer = await played.ask_twice(request)
        assert answer.text == said.text
        assert list(answer.token_ids) == said.recited[: said.num_tokens]
        assert answer.finish_reason == REASONS[said.reason]
        assert (answer.stop_string or answer.stop_token_id or None) == said.stop
        if "num_logprobs" in said.options:
            assert [p.token_id for p in answer.logprobs] == list(answer.token_ids)
        if said.reason != "STOP_STRING":
            played.check_drafts_counted(answer)
        if played.speculates and said.num_steps:
            assert answer.speculation.num_steps == said.num_steps
        if mode == ON:
            check_totals(played, said)


def check_totals(played: Stage, said: Said) -> None:
    """The registry counts tokens up to the end, and apart from them what was computed past it."""
    asked = 2  # at once and as a stream
    complete = played.total("generation_tokens") - played.total("discarded_tokens")
    assert complete == asked * said.num_tokens
    reason = FinishReason[said.reason].value
    assert played.total("requests", finish_reason=reason) == played.total("requests") == asked
    if said.reason == "STOP_STRING":
        num_run = said.options.get("max_new_tokens", len(said.recited))
        past_stop = played.total("discarded_tokens", reason="past_stop")
        assert past_stop == asked * (num_run - said.num_tokens) > 0
    elif said.num_steps == 1:
        assert played.total("spec_steps") == asked
        assert played.total("spec_accepted_tokens") == asked * said.num_tokens
        assert played.total("spec_emitted_tokens") == asked * said.num_tokens


ROOMY = Recital([*b"the quick fox jumps over my lazy dog"], strength=3.0)
"""Says many things: about every third token is the recited one."""
DRONE = Recital([*b"aa"], strength=5.0)
"""Says "a" until a penalty stops it."""


async def bytes_that_form_nothing(played: Stage) -> None:
    for seed in range(2):
        high = list(range(0x80, 0x100))
        request = ask_for("hot", 24, 2.0, allowed_token_ids=high, seed=seed)
        answer = await played.ask_twice(request)
        assert list(answer.token_ids) == played.truth(request)
        assert answer.text == bytes(answer.token_ids).decode(errors="replace")
        played.check_drafts_counted(answer)


async def logprobs_of_drafted_tokens(played: Stage) -> None:
    for temperature in (0.0, 0.8):
        request = ask_for("the ", 20, temperature, num_logprobs=3, seed=2, ignore_eos=True)
        answer = await played.ask_twice(request)
        played.check_drafts_counted(answer)
        tokens = [*b"the "]
        for token, said in zip(played.truth(request), answer.logprobs, strict=True):
            logits = played.recital.logits(tokens)
            expected = logits.log_softmax(-1)
            assert said.token_id == token
            assert said.logprob == pytest.approx(expected[token].item(), abs=1e-4)
            assert said.rank == 1 + int((logits > logits[token]).sum())
            assert [top.token_id for top in said.top] == logits.topk(3).indices.tolist()
            assert [top.logprob for top in said.top] == pytest.approx(
                logits.log_softmax(-1).topk(3).values.tolist(), abs=1e-4
            )
            tokens.append(token)


async def penalties_count_every_token(played: Stage) -> None:
    texts = {}
    for name, penalty, bias in [
        ("frequency_penalty", -2.0, 0.0),
        ("frequency_penalty", 0.5, 0.0),
        ("frequency_penalty", 2.0, 0.0),
        ("presence_penalty", 0.0, -4.0),
        ("presence_penalty", 2.0, -4.0),
        ("repetition_penalty", 4.0, 0.0),
    ]:
        for temperature in (0.0, 0.7):
            law: dict[str, Any] = {name: penalty, "seed": 3, "logit_bias": {ord("a"): bias}}
            request = ask_for("aa", 20, temperature, ignore_eos=True, **law)
            answer = await played.check_right(request)
            played.check_drafts_counted(answer)
            texts[name, penalty, temperature] = answer.text
    droned = {key for key, text in texts.items() if text == "a" * 20}
    assert droned == {("frequency_penalty", -2.0, t) for t in (0.0, 0.7)} | {
        ("presence_penalty", 0.0, 0.0)
    }
    half, full = (texts["frequency_penalty", penalty, 0.0] for penalty in (0.5, 2.0))
    assert 0 < full.count("a") < half.count("a")


async def ends_are_masked_up_to_the_minimum(played: Stage) -> None:
    prompt, ending = "so: ", [*b"so: ab", EOS_ID]
    assert ending == [*prompt.encode(), *played.truth(ask_for(prompt))]
    for num_tokens in (3, 4, 9):
        request = ask_for(prompt, 24, min_new_tokens=num_tokens, logit_bias={EOS_ID: 30.0})
        answer = await played.check_right(request)
        assert len(answer.token_ids) == num_tokens + 1  # the bias ends it where nothing masks it
        assert answer.finish_reason == pb.FINISH_REASON_EOS
        played.check_drafts_counted(answer)


async def seeds_of_concurrent_requests(played: Stage) -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 7, 7]
    requests = [ask_for("the ", 24, 1.0, seed=seed) for seed in seeds]
    answers = await asyncio.gather(*map(played.check_right, requests))
    texts = [answer.text for answer in answers]
    assert texts[4] == texts[5]
    assert len(set(texts)) == 5


async def requests_without_a_seed(played: Stage) -> None:
    request = ask_for("the ", 24, 1.0)
    generate = played.server.stub.Generate
    responses = await asyncio.gather(*(generate(request) for _ in range(6)))
    assert len({tuple(response.answers[0].token_ids) for response in responses}) == 6
    for response in responses:
        request.sampling.seed = response.seed
        assert list(response.answers[0].token_ids) == played.truth(request)


async def concurrent_translations(played: Stage) -> None:
    """Prompts of all lengths join and leave, so that every batch is mixed."""

    async def translate(number: int) -> None:
        await asyncio.sleep(number / 500)
        source = " ".join(random.Random(number).choices(["fox", "dog", "my", "lazy"], k=number))
        request = ask_for(f"translate {source}: the ", 12 + number, number % 2, seed=number)
        answer = await played.check_right(request)
        played.check_drafts_counted(answer)

    await asyncio.gather(*map(translate, range(1, 13)))


PLAYED: list[tuple[str, Recital, Play]] = [
    ("row02-vllm-17448-high-temperature", ROOMY, bytes_that_form_nothing),
    ("row09-llama.cpp-27972-logprobs-of-drafts", ROOMY, logprobs_of_drafted_tokens),
    ("row10-sglang-33643-vllm-18902-penalties", DRONE, penalties_count_every_token),
    (
        "row10-sglang-33643-minimum-length",
        Recital([*b"so: ab", EOS_ID]),
        ends_are_masked_up_to_the_minimum,
    ),
    ("row11-vllm-6038-trtllm-19487-mixed-seeds", ROOMY, seeds_of_concurrent_requests),
    ("row11-vllm-9441-without-seeds", ROOMY, requests_without_a_seed),
    ("row15-tgi-1411-concurrent-translations", ROOMY, concurrent_translations),
]


@pytest.mark.parametrize("mode", SPECULATION)
@pytest.mark.parametrize(
    ("recital", "play"), [each[1:] for each in PLAYED], ids=[each[0] for each in PLAYED]
)
async def test_drawn(recital: Recital, play: Play, mode: str) -> None:
    async with stage(mode, recital) as played:
        await play(played)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("mode", SPECULATION)
async def test_row15_tgi_2997_suffix_drafts_with_quantised_weights(
    mode: str, kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The truth is transformers' own `generate` on the same rounded weights, one prompt at a time."""
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    theirs = tiny_family("llama")
    write_gguf(tmp_path / "m.gguf", "llama", theirs, kind)
    prompts = [[5, 9, 20, 33, 5, 9, 20], [41, 7, 41, 7, 41], [12, 64, 3]]
    truth = [
        theirs.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)[
            0, len(ids) :
        ].tolist()
        for ids in prompts
    ]
    model = load_model(str(tmp_path / "m.gguf"), attention=ATTENTION, activations="fp32").model
    drafter = None if mode == OFF else SuffixDrafter()
    engine = build_engine(model, (), replace(SMALL, num_threads=1), drafter)
    async with running(EngineLoop(engine, "tiny")) as server:
        requests = [ask_for(ids, 40, ignore_eos=True) for ids in prompts]
        if mode == BATCH:
            responses = await asyncio.gather(*map(server.stub.Generate, requests))
        else:
            responses = [await server.stub.Generate(request) for request in requests]
        answers = [response.answers[0] for response in responses]
        assert [list(answer.token_ids) for answer in answers] == truth
        accepted = sum(answer.speculation.num_accepted for answer in answers)
        assert (accepted > 10) == (mode != OFF)
        check_gauges(server)
