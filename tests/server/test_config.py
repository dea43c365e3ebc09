"""ServeConfig refuses settings that make no sense, by name."""

import pytest

from headway.server.config import ServeConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("metrics_port", -2),
        ("default_max_new_tokens", 0),
        ("max_prompt_bytes", 0),
        ("max_message_bytes", 10),
        ("drain_seconds", -0.5),
        ("drain_grace_seconds", float("nan")),
        ("keepalive_seconds", 0),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        ServeConfig(**{name: value})  # type: ignore[arg-type]


def test_ports_may_be_free_or_shut() -> None:
    ServeConfig(port=0, metrics_port=-1, max_request_seconds=0)
