"""The server's settings. Each docstring under a field is its help text on the command line."""

from dataclasses import dataclass

_MAX_INT = 2**31 - 1
"""gRPC takes its numbers as C ints, times in milliseconds."""
_MAX_SECONDS = _MAX_INT // 1000


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where requests are taken, and how much one client may ask for."""

    host: str = "127.0.0.1"
    """Address that both ports listen on; 0.0.0.0 or [::] lets other machines in."""
    port: int = 50051
    """gRPC port; 0 takes a free one and says which."""
    metrics_port: int = 9090
    """HTTP port of /metrics, /healthz and /readyz; 0 takes a free one, -1 opens none."""
    reflection: bool = True
    """Let tools such as grpcurl ask for the services and their messages."""
    default_max_new_tokens: int = 1024
    """Tokens of an answer whose request does not say; the context may end it sooner."""
    max_prompt_bytes: int = 2**20
    """Longest prompt, as text or as sent; longer ones are refused before they are tokenised."""
    max_message_bytes: int = 4 * 2**20
    """Largest gRPC message that the server reads."""
    max_request_seconds: float = 600.0
    """Ends requests whose client sets no deadline; 0 lets them run."""
    max_stall_seconds: float = 120.0
    """With requests at hand and no step for so long, the health service says NOT_SERVING."""
    drain_grace_seconds: float = 5.0
    """After SIGTERM: how long new requests are still taken, for routers that have not noticed."""
    drain_seconds: float = 30.0
    """After the grace: how long running requests may take to finish before they are aborted."""
    keepalive_seconds: float = 60.0
    """How often a silent connection is pinged; one that does not answer in 20 s is closed."""
    max_connection_age_seconds: float = 600.0
    """Clients are asked to reconnect after this time, so that they find new replicas; 0 never."""

    def __post_init__(self) -> None:
        """Raise ValueError for what gRPC or the system would take as something else, or crash on."""
        if not self.host:
            raise ValueError("host is empty; name an address, such as 127.0.0.1 or 0.0.0.0")
        allowed = {
            "port": (0, 65_535),
            "metrics_port": (-1, 65_535),
            "default_max_new_tokens": (1, _MAX_INT),
            "max_prompt_bytes": (1, _MAX_INT),
            "max_message_bytes": (1024, _MAX_INT),
            "max_request_seconds": (0, _MAX_SECONDS),
            "max_stall_seconds": (0, _MAX_SECONDS),
            "drain_grace_seconds": (0, _MAX_SECONDS),
            "drain_seconds": (0, _MAX_SECONDS),
            "keepalive_seconds": (1, _MAX_SECONDS),
            "max_connection_age_seconds": (0, _MAX_SECONDS),
        }
        for name, (low, high) in allowed.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN is in no range
                raise ValueError(f"{name} is {value}; {low} to {high} are allowed")
