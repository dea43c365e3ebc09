"""The Python client against a server on another thread, as a program would use it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

from fake_engine import FakeEngine
from headway.engine.errors import (
    EngineStopped,
    InvalidRequest,
    Overloaded,
    UnknownModel,
    Violation,
)
from headway.engine.request import Request
from headway.protos import text_generation_pb2 as pb
from headway.server.client import Client
from headway.server.errors import AnswerFailed, to_rpc_error
from loopback import threaded

ROOT = Path(__file__).resolve().parents[2]


def test_every_call() -> None:
    with threaded() as server, Client(server.target) as client:
        answer = client.generate("abc", max_new_tokens=4, temperature=0.5, n=2, seed=3)
        assert [a.text for a in answer.answers] == ["abca", "abca"]
        asked = server.engine.submitted[0]
        assert (asked.sampling.temperature, asked.sampling.seed) == (0.5, 3)
        events = list(client.stream([97, 98], max_new_tokens=2, stop_strings=["b"]))
        assert "".join(e.delta.text for e in events) == "a"
        chat = [{"role": "user", "content": "hi"}]
        assert bytes(client.tokenize(chat)).decode() == "<user>hi<assistant>"
        assert client.count_tokens("abc") == 3
        assert client.detokenize([97, 98]) == "ab"
        assert len(client.score("abc", num_prompt_logprobs=2).logprobs) == 2
        client.abort("nobody")
        assert client.model_info().model == "tiny"


def test_all_kinds_of_options_arrive() -> None:
    with threaded() as server, Client(server.target) as client:
        client.generate(
            "a",
            max_new_tokens=1,
            logit_bias={5: 1.5},
            allowed_token_ids=[1, 2],
            bad_words=["DEF"],
            stop_token_ids=[9],
            enabled=False,
            max_draft_tokens=3,
            num_logprobs=0,
            cache_salt="tenant",
            use_prefix_cache=False,
            priority=-2,
        )
        asked = server.engine.submitted[0]
        assert asked.sampling.logit_bias == {5: 1.5}
        assert asked.sampling.allowed_token_ids == (1, 2)
        assert asked.sampling.bad_words == ((32, 257), (257,))
        assert asked.stopping.stop_token_ids == (9,)
        assert (asked.speculation.enabled, asked.speculation.max_draft_tokens) == (False, 3)
        assert (asked.num_logprobs, asked.num_prompt_logprobs) == (0, None)
        assert (asked.cache_salt, asked.use_prefix_cache, asked.priority) == ("tenant", False, -2)


def test_options_that_are_not_set_keep_the_engines_defaults() -> None:
    with threaded() as server, Client(server.target) as client:
        client.generate("a", seed=0, max_new_tokens=5)
        plain = Request("x#0", (97,), server.engine.submitted[0].stopping)
        asked = server.engine.submitted[0]
        assert asked.sampling == plain.sampling
        assert asked.speculation == plain.speculation
        assert asked.use_prefix_cache is plain.use_prefix_cache


def test_misspelt_option_names_the_near_ones() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="temperature"):
        client.generate("x", temprature=1.0)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest(Violation("temperature", "is nan")),
        UnknownModel("no such model"),
        Overloaded("full", reason="prompt_tokens", retry_seconds=0.25),
        EngineStopped("dead"),
    ],
)
def test_errors_come_back_as_they_were_raised(error: Exception) -> None:
    def refuse(request: Request) -> None:
        raise error

    with threaded(FakeEngine(refuse=refuse)) as server, Client(server.target) as client:
        with pytest.raises(type(error)) as caught:
            client.generate("x")
        for name, value in vars(error).items():
            if name != "violations":
                assert getattr(caught.value, name) == value
        if isinstance(caught.value, InvalidRequest):
            assert caught.value.violations == (Violation("sampling.temperature", "is nan"),)


def test_deadline_and_unreachable_server_stay_grpcs_own_errors() -> None:
    with threaded() as server, Client(server.target) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.generate("abc", max_new_tokens=4000, timeout_seconds=0.1)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    with Client("127.0.0.1:1") as client, pytest.raises(grpc.RpcError) as caught:
        client.model_info(timeout_seconds=2)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_leaving_a_stream_early_cancels_it() -> None:
    with threaded() as server, Client(server.target) as client:
        for _ in client.stream("abc", max_new_tokens=4000):
            break
        client.generate("abc", max_new_tokens=1)
        assert server.engine.submitted[0].request_id
        for _ in range(300):
            if server.engine.num_requests == 0:
                break
            threading.Event().wait(0.01)
        assert server.engine.num_requests == 0


def test_one_event_loop_serves_many_threads_of_clients(capfd: pytest.CaptureFixture[str]) -> None:
    """grpc#42357, #25364: BlockingIOError where two event loops touched grpc.aio."""
    texts: list[str] = []

    def ask(target: str) -> None:
        with Client(target) as client:
            for _ in range(5):
                events = client.stream("abc", max_new_tokens=30)
                texts.append("".join(e.delta.text for e in events))

    with threaded(FakeEngine(step_seconds=0.0)) as server:
        threads = [threading.Thread(target=ask, args=(server.target,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert texts == ["abc" * 10] * 40
    assert "BlockingIOError" not in capfd.readouterr().err


def test_details_stay_small_whatever_the_error_holds() -> None:
    many = InvalidRequest(*(Violation(f"f{i}", "x" * 10_000) for i in range(100)))
    for error in (many, AnswerFailed("y" * 100_000), RuntimeError("z" * 100_000)):
        shown = to_rpc_error(error, "id")
        assert sum(len(value) for _, value in shown.trailers()) + len(shown.message) < 7000


def test_unset_is_not_zero() -> None:
    assert not pb.GenerateRequest().sampling.HasField("temperature")
    assert pb.GenerateRequest(sampling={"temperature": 0.0}).sampling.HasField("temperature")


def test_a_program_that_only_calls_loads_no_model_code() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'prometheus_client'}"
    code = f"import sys, headway.server.client; sys.exit(sorted({heavy} & sys.modules.keys()) or 0)"
    environment = {**os.environ, "PYTHONPATH": ".src"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)


def test_a_proxy_of_the_environment_is_not_asked_for_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY")
    with threaded() as server, Client(server.target) as client:
        assert client.count_tokens("abc") == 3
