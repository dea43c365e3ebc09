import pytest

from headway.draft_heads.config import HeadsTrainConfig, HydraConfig
from headway.draft_heads.tree_shape import EIGHT_NODES, TreeShape
from headway.engine.errors import UsageError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads: got 0; at least 1"),
        ({"num_heads": 4, "tree": "eight"}, "num_heads: got 4; at least 5"),
        ({"epochs": 0}, "epochs"),
        ({"max_steps": -1}, "max_steps"),
        ({"max_chat_tokens": 3}, "max_chat_tokens"),
        ({"batch_tokens": 100}, "batch_tokens: got 100; at least 1024"),
        ({"eval_interval_steps": 0}, "eval_interval_steps"),
        ({"learning_rate": float("nan")}, "learning_rate: got nan"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"warmup_ratio": 1.0}, "warmup_ratio"),
        ({"eval_fraction": 0.0}, "eval_fraction"),
        ({"draft_vocab_size": 15}, "draft_vocab_size: got 15; 0 or at least 16"),
    ],
)
def test_bad_training_settings_name_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HeadsTrainConfig(data="x", out="y", **changes)


def test_all_bad_settings_are_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"epochs: got 0.*learning_rate: got 2"):
        HeadsTrainConfig(data="x", out="y", epochs=0, learning_rate=2)


def test_the_named_trees() -> None:
    assert HeadsTrainConfig("x", "y", num_heads=3).tree_shape() == TreeShape.chain(3)
    assert HeadsTrainConfig("x", "y", num_heads=5, tree="eight").tree_shape() == EIGHT_NODES


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 64, 4, TreeShape.chain(4)), "hidden_size"),
        ((32, 64, 4, TreeShape.chain(5)), "5 levels deep"),
        ((32, 64, 4, TreeShape(())), "0 levels deep"),
        ((32, 2, 4, TreeShape.of([(0,), (1,), (2,)])), "vocabulary of 2"),
    ],
)
def test_heads_that_cannot_be_built_are_refused(values: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HydraConfig(*values)
