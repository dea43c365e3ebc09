"""Bad input by field, and what a request becomes for the engine."""

import grpc
import pytest
from google.protobuf.message import Message

from fake_engine import FakeEngine
from headway.engine.errors import InvalidRequest, Violation
from headway.engine.request import Request
from headway.engine.validation import check_request
from headway.protos import text_generation_pb2 as pb
from headway.server.convert import derived_seed
from headway.server.errors import from_rpc_error
from loopback import Running, running


async def canary(server: Running) -> None:
    answer = await server.stub.Generate(
        pb.GenerateRequest(text="ok", stopping=pb.Stopping(max_new_tokens=2))
    )
    assert answer.answers[0].text == "ok"


def many_stops() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", stopping=pb.Stopping(stop_strings=["s"] * 3000))


BAD_REQUESTS: list[tuple[str, Message, str]] = [
    ("prompt", pb.GenerateRequest(), "one of text, token_ids, chat"),
    ("text", pb.GenerateRequest(text="x" * 1001), "1,000"),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[97] * 1001)), "1,000"),
    ("chat.messages", pb.GenerateRequest(chat=pb.Chat()), "empty"),
    ("chat.messages[0].role", pb.GenerateRequest(chat={"messages": [{"content": "x"}]}), "empty"),
    (
        "chat",
        pb.GenerateRequest(chat={"messages": [{"role": "u", "content": "x" * 1001}]}),
        "1,000",
    ),
    (
        "chat.continue_final_message",
        pb.GenerateRequest(
            chat={
                "messages": [{"role": "user", "content": "x"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            }
        ),
        "excludes",
    ),
    # A million bad items are one short message, found without walking through them.
    ("chat", pb.GenerateRequest(chat=pb.Chat.FromString(b"\n\0" * 501)), "1,002 bytes"),
    (
        "sampling",
        pb.GenerateRequest(text="x", sampling={"allowed_token_ids": [-1] * 30_000}),
        "300,004 bytes; at most 262,144",
    ),
    (
        "stopping",
        pb.GenerateRequest(text="x", stopping={"stop_token_ids": [1] * 262_144}),
        "at most 262,144",
    ),
    ("request_id", pb.GenerateRequest(text="x", request_id="i" * 200), "128"),
    ("n", pb.GenerateRequest(text="x", n=0), "1 to 16"),
    ("n", pb.GenerateRequest(text="x", n=-1), "is -1"),
    ("stopping.stop_strings", many_stops(), "3,000"),
    (
        "stopping.stop_strings[1]",
        pb.GenerateRequest(text="x", stopping={"stop_strings": ["a", ""]}),
        "empty",
    ),
    (
        "stopping.stop_strings[0]",
        pb.GenerateRequest(text="x", stopping={"stop_strings": ["a" * 1025]}),
        "1,024",
    ),
    (
        "sampling.bad_words",
        pb.GenerateRequest(text="x", sampling={"bad_words": ["a"] * 129}),
        "128",
    ),
    (
        "response.num_logprobs",
        pb.GenerateRequest(text="x", response={"num_logprobs": 21}),
        "at most 20",
    ),
    (
        "response.num_prompt_logprobs",
        pb.GenerateRequest(text="x", response={"num_prompt_logprobs": -1}),
        "is -1",
    ),
]


@pytest.mark.parametrize(("field", "request_", "words"), BAD_REQUESTS)
async def test_bad_input_names_its_field(field: str, request_: Message, words: str) -> None:
    engine = FakeEngine(refuse=lambda request: check_request(request, engine.limits))
    async with running(engine, max_prompt_bytes=1000) as server:
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(request_)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert [v.field for v in error.violations] == [field]
        assert words in error.violations[0].message
        assert server.engine.submitted == []
        await canary(server)


async def test_all_bad_fields_are_named_at_once() -> None:
    async with running() as server:
        request = pb.GenerateRequest(n=99, stopping={"stop_strings": [""]}, request_id="i" * 999)
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(request)
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert {v.field for v in error.violations} == {
            "prompt",
            "n",
            "stopping.stop_strings[0]",
            "request_id",
        }


async def test_engine_refusals_come_back_under_the_clients_field_names() -> None:
    """vllm#7283, #7632: an empty prompt killed the engine; here its refusal names `text`."""

    def refuse(request: Request) -> None:
        if not request.prompt_ids:
            raise InvalidRequest(
                Violation("prompt", "is empty"),
                Violation("temperature", "is nan"),
                Violation("logit_bias[999]", "is out of the vocabulary"),
                Violation("num_logprobs", "is too many"),
            )

    async with running(FakeEngine(refuse=refuse)) as server:
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Generate(pb.GenerateRequest(text=""))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert [v.field for v in error.violations] == [
            "text",
            "sampling.temperature",
            "sampling.logit_bias[999]",
            "response.num_logprobs",
        ]
        await canary(server)


@pytest.mark.parametrize(
    ("token_ids", "field"),
    [([97, 300], "token_ids[1]"), ([-1], "token_ids[0]"), ([97] * 5000, "token_ids")],
)
async def test_detokenize_names_the_bad_id(token_ids: list[int], field: str) -> None:
    async with running() as server:
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == field


async def test_abort_of_too_many_is_refused() -> None:
    async with running() as server:
        with pytest.raises(grpc.RpcError) as caught:
            await server.stub.Abort(pb.AbortRequest(request_ids=["x"] * 1025))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "request_ids"


def test_derived_seeds_are_pinned() -> None:
    """They are part of the API: the same request must give the same n answers for ever."""
    assert derived_seed(5, 0) == 5
    assert derived_seed(5, 1) == 2_950_057_850_425_018_533
    assert len({derived_seed(s, i) for s in range(10) for i in range(1, 16)}) == 150
