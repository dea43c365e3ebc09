import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from transformers import LlamaForCausalLM

from headway.draft_heads.hydra import HydraHeads
from headway.draft_heads.store import load_heads, save_heads
from headway.draft_heads.tree_shape import EIGHT_NODES
from headway.engine.errors import ModelLoadError
from tiny import VOCAB_SIZE, tiny_model

MakeHeads = Callable[..., HydraHeads]


@pytest.fixture
def folder(tmp_path: Path, make_heads: MakeHeads, model: LlamaForCausalLM) -> Path:
    save_heads(tmp_path / "heads", make_heads(5, EIGHT_NODES), model, "tiny", {"tau": 2.5})
    return tmp_path / "heads"


@pytest.mark.parametrize("draft_ids", [None, [0, 2, 5, 63]])
@pytest.mark.parametrize("own_output_heads", [False, True])
def test_round_trip(
    tmp_path: Path,
    make_heads: MakeHeads,
    model: LlamaForCausalLM,
    own_output_heads: bool,
    draft_ids: list[int] | None,
) -> None:
    heads = make_heads(5, EIGHT_NODES, own_output_heads=own_output_heads, draft_ids=draft_ids)
    save_heads(tmp_path, heads, model, "tiny", {})
    loaded = load_heads(tmp_path, model)
    assert loaded.config == heads.config
    assert loaded.num_outputs == (len(draft_ids) if draft_ids else VOCAB_SIZE)
    assert draft_ids is None or loaded.token_ids(torch.arange(4)).tolist() == draft_ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([7, 8, 9])
    assert torch.equal(
        loaded.logits(loaded.begin(hidden, ids, 5)), heads.logits(heads.begin(hidden, ids, 5))
    )


def test_what_the_config_says(folder: Path) -> None:
    record = json.loads((folder / "config.json").read_text())
    del record["weights_sha256"]
    assert record == {
        "format_version": 1,
        "model_type": "hydra",
        "num_heads": 5,
        "hidden_size": 32,
        "vocab_size": VOCAB_SIZE,
        "tree": [list(path) for path in EIGHT_NODES.paths],
        "own_output_heads": False,
        "target": {"name": "tiny", "architecture": "LlamaForCausalLM", "num_layers": 2},
        "training": {"tau": 2.5},
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_follow_the_model_s_dtype(folder: Path, dtype: torch.dtype) -> None:
    heads = load_heads(folder, tiny_model().to(dtype))
    hidden = torch.ones(2, 32, dtype=dtype)
    logits = heads.logits(heads.begin(hidden, torch.tensor([7, 8]), 5))
    assert {p.dtype for p in heads.parameters()} == {dtype}
    assert logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 32 against 64"),
        ({"vocab_size": 65}, "vocab_size 64 against 65"),
        ({"num_hidden_layers": 3}, "num_layers 2 against 3"),
        ({"seed": 1}, "the weights differ"),
    ],
)
def test_another_target_is_refused(folder: Path, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"'tiny', another model .*{message}"):
        load_heads(folder, tiny_model(**changes))


def test_a_tuned_target_is_refused(folder: Path) -> None:
    tuned = tiny_model()
    tuned.model.embed_tokens.weight *= 1.05
    with pytest.raises(ModelLoadError, match="the weights differ"):
        load_heads(folder, tuned)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is 2; this version reads 1"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"num_heads": None}, "damaged heads"),
        ({"num_heads": 3}, "damaged heads: tree: is 5 levels deep"),
        ({"num_heads": 6}, "do not fit config.json"),
        ({"tree": [[0, 0]]}, "damaged heads: tree"),
        ({"weights_sha256": "0"}, "weights_sha256 differs"),
        ({"num_heads": 1e9}, "do not fit config.json"),
        ({"target": "tiny"}, "architecture None against LlamaForCausalLM"),
        ({"target": {}}, "architecture None against LlamaForCausalLM"),
    ],
)
def test_a_bad_config_is_refused(
    folder: Path, model: LlamaForCausalLM, changes: dict[str, object], message: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=message):
        load_heads(folder, model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("keep_bytes", [0, 20, -1, None])
def test_truncated_and_missing_files_are_refused(
    folder: Path, model: LlamaForCausalLM, name: str, keep_bytes: int | None
) -> None:
    path = folder / name
    if keep_bytes is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ModelLoadError, match=name):
        load_heads(folder, model)


def test_a_full_disk_leaves_the_older_heads_whole(
    folder: Path, make_heads: MakeHeads, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_heads(folder, make_heads(3), model, "tiny", {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([2, 5, 64], "draft_ids: has ids from 2 to 64"),
        ([5, 2, 9], "draft_ids: has 2 after 5"),
        ([5, 5, 9], "draft_ids: has 5 after 5"),
        ([5], "draft_ids: has 1 tokens; the tree tries 2"),
    ],
)
def test_a_wrong_draft_vocabulary_is_refused(
    folder: Path, model: LlamaForCausalLM, ids: list[int], message: str
) -> None:
    path = folder / "model.safetensors"
    weights = save({**load(path.read_bytes()), "draft_ids": torch.tensor(ids)})
    path.write_bytes(weights)
    record = json.loads((folder / "config.json").read_text())
    record["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(ModelLoadError, match=f"{message}.*; copy or train the heads again"):
        load_heads(folder, model)


def test_own_projections_must_fit_the_draft_vocabulary(
    tmp_path: Path, make_heads: MakeHeads, model: LlamaForCausalLM
) -> None:
    heads = make_heads(2, own_output_heads=True)
    heads.draft_ids = torch.tensor([2, 5, 9])
    save_heads(tmp_path, heads, model, "tiny", {})
    with pytest.raises(ModelLoadError, match=r"do not fit config\.json"):
        load_heads(tmp_path, model)
