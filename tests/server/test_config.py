"""ServeConfig refuses what would be taken as something else, or crash what it is given to."""

import math
import re

import pytest

from headway.server.config import ServeConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70_000),  # gRPC would listen on 4464
        ("port", -1),
        ("metrics_port", 70_000),
        ("metrics_port", -5),
        ("default_max_new_tokens", 0),
        ("max_prompt_bytes", 0),
        ("max_message_bytes", 10),
        ("max_message_bytes", 2**31),
        ("max_request_seconds", -1.0),
        ("max_stall_seconds", math.nan),
        ("drain_grace_seconds", -3.0),
        ("drain_seconds", math.inf),
        ("keepalive_seconds", 0.0),
        ("max_connection_age_seconds", 1e18),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is {re.escape(str(value))}; .* are allowed$"):
        ServeConfig(**{name: value})  # type: ignore[arg-type]


def test_an_empty_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^host is empty; name an address"):
        ServeConfig(host="")


def test_ports_may_be_free_or_shut() -> None:
    ServeConfig(port=0, metrics_port=-1, max_request_seconds=0)
