"""peers.py: what every peer is asked, how it is asked, and what is made of its answers."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import peer_process
import peers
import pytest
from peer_process import PEERS_FOLDER, PeerFailed, PeerKind, Process, llama_cpp_flags, python_of
from peers import Plan, same_tokens

STUB = """
    import sys
    sys.path.insert(0, {folder!r})
    from talk import serve

    class Stub:
        version = "7"

        def __init__(self, settings):
            print("noise of a library")
            if settings["num_threads"] == 13:
                raise RuntimeError("no such model")

        def generate(self, prompts, num_streams, max_new_tokens, limit_seconds):
            return [prompt[:max_new_tokens] for prompt in prompts]

        def first_token(self, prompt):
            print("more noise", flush=True)
            if not prompt:
                raise SystemExit("an empty prompt")

        def describe(self):
            return {{"stop_ids": [2]}}

    serve(Stub)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stub.py"
    path.write_text(textwrap.dedent(STUB).format(folder=str(PEERS_FOLDER)))
    monkeypatch.setitem(peer_process.PEERS, "stub", PeerKind(str(path)))


@pytest.fixture
def peer(stub: None) -> Iterator[Process]:
    process = Process("stub", sys.executable, {"num_threads": 1})
    yield process
    process.close()


def test_a_peer_answers_line_by_line(peer: Process) -> None:
    assert peer.version == "7"
    assert peer.ask({"do": "describe"}) == {"describe": {"stop_ids": [2]}}
    plan = Plan([[1, 2, 3, 4], [5, 6, 7]], [1, 2], 1, 3, 5.0)
    measured = dict(peers.measure(peer, plan, 0))
    assert peer.answers == [[1, 2, 3], [5, 6, 7]]
    assert measured.keys() == {
        *("tokens_per_second_1", "tokens_per_second_2"),
        *("first_token_ms", "prefill_ms", "peak_bytes"),
    }
    assert min(measured["tokens_per_second_1"], measured["first_token_ms"]) > 0
    assert 0 <= measured["peak_bytes"] < 1 << 30


def test_a_peer_that_dies_says_why(peer: Process) -> None:
    with pytest.raises(PeerFailed, match="stub has ended: an empty prompt"):
        peer.ask({"do": "first_token", "prompt": []})
    with pytest.raises(PeerFailed, match="stub has ended"):
        peer.ask({"do": "memory"})


def test_a_peer_that_cannot_load_says_why(stub: None) -> None:
    with pytest.raises(PeerFailed, match="RuntimeError: no such model"):
        Process("stub", sys.executable, {"num_threads": 13})


def test_a_peer_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", "/nonexistent")
    with pytest.raises(PeerFailed, match=r"run --install vllm, or give --env vllm=FOLDER"):
        python_of("vllm-bf16", {})
    assert python_of("headway", {}) == sys.executable


def test_llama_cpp_is_built_for_the_processor_but_amx(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags : fpu avx avx2 fma f16c avx512f avx512_vnni amx_int8\n")
    flags = llama_cpp_flags(path).split()
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512_VNNI=ON"} <= set(flags)
    assert {"-DGGML_AVX_VNNI=OFF", "-DGGML_BMI2=OFF"} <= set(flags)
    assert "AMX" not in "".join(flags)


def test_prompts_of_a_round() -> None:
    prompts = [[i] for i in range(16)]
    plan = Plan(prompts, [1, 4, 16], 2, 8, 1.0)
    assert plan.prompts_of(1, 0) == prompts[0::2]
    assert plan.prompts_of(4, 1) == prompts[1::2]
    assert plan.prompts_of(16, 1) == prompts * 2
    assert plan.text(20, 1) == [*range(1, 16), *range(5)]


def test_same_tokens() -> None:
    assert same_tokens([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == 1.0
    assert same_tokens([[1, 2, 3, 4], [5]], [[1, 9, 3, 4], [5]]) == pytest.approx(2 / 5)
    assert same_tokens([[1, 2]], [[1, 2, 3]]) == 1.0
    assert same_tokens([[]], [[]]) == 0.0


def test_a_peer_is_shown_by_what_it_does_best() -> None:
    measured = {
        "tokens_per_second_1": [80.0, 90.0],
        "tokens_per_second_8": [60.0, 70.0],
        "first_token_ms": [50.0, 60.0],
        "prefill_ms": [1000.0, 1048.0],
        "peak_bytes": [5.0, 7.0],
    }
    answers = {"headway": [[1, 2]], "llama.cpp": [[1, 3]]}
    row = peers._row("llama.cpp", measured, answers)
    assert row["tokens_per_second_8"] == row["tokens_per_second_1"] == 85.0
    assert row["prefill_tokens_per_second"] == 500.0
    assert row["peak_bytes"] == 7.0
    assert row["same_tokens"] == 0.5
    # Headway's own is not mended.
    assert peers._row("headway", measured, answers)["tokens_per_second_8"] == 65.0


@pytest.mark.parametrize(
    "flags",
    [["--peers", "llama.cpp"], ["--num-prompts=0"], ["--env", "x=/y"], ["--streams", "0"]],
    ids=" ".join,
)
def test_flags_are_checked(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        peers.parse(flags)
    assert ended.value.code == 2
