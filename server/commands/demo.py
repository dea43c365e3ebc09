"""`headway demo`: the whole thing once. A model, a server, a client, and what speculation is good for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from rich.console import Console
from rich.table import Table

from headway.engine.request import tau
from headway.protos import text_generation_pb2 as pb
from headway.server.assembly import Assembled, ModelSettings, assemble
from headway.server.client import Client, Prompt
from headway.server.commands.progress import progress_bars
from headway.server.convert import to_response
from headway.server.local import local_server
from headway.server.settings import FLAT

PROMPT = """Rewrite this text with correct capital letters and punctuation:

the river was calm in the morning. fishermen walked along the river and set their nets beside the \
old stone bridge. by noon the river was full of small boats, and children threw bread to the ducks \
that lived on the river. in the evening the fishermen took their nets home, and the river was calm \
again."""
"""Its answer repeats much of it: the work that drafting from earlier text is good at."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Show a model being served, with and without speculation.

    Gets the model if it is not here, starts a gRPC server on loopback, and asks it the same question
    twice through the gRPC client. Exit code 1 means that the two answers differ.
    """

    prompt: str = PROMPT
    """What to ask."""
    max_new_tokens: int = 96
    """Tokens of the answer at most."""
    model: Annotated[ModelSettings, FLAT] = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        if self.model.drafter == "off":
            raise ValueError("speculation is off; the demo compares it with suffix or heads")


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer and how long it took on the client's clock."""

    answer: pb.Answer
    seconds: float
    first_token_seconds: float

    @property
    def num_tokens(self) -> int:
        return self.answer.usage.num_new_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tau(self) -> float:
        stats = self.answer.speculation
        return tau(stats.num_emitted, stats.num_steps)


def demo(config: DemoConfig) -> int:
    """Load, serve, ask twice, and print what came of it."""
    console = Console(highlight=False)
    started = time.perf_counter()
    with progress_bars(console) as report:
        assembled = assemble(config.model, report)
    with local_server(assembled) as address, Client(address) as client:
        ready_seconds = time.perf_counter() - started
        console.print(
            f"{assembled.loaded.name} is served at {address}, loaded in {ready_seconds:.1f} s.\n"
        )
        prompt = _prompt(config, assembled)
        console.print(f"[bold]{config.prompt}[/]\n", markup=True)
        fast = _ask(client, prompt, config.max_new_tokens, is_speculative=True, console=console)
        console.print("\n\n[dim]The same without speculation ...[/]")
        plain = _ask(client, prompt, config.max_new_tokens, is_speculative=False)
    console.print(_table([("off", plain), (config.model.drafter, fast)]))
    if fast.answer.token_ids != plain.answer.token_ids:
        console.print("[bold red]The two answers differ.[/] Rounding may do that; look closer.")
        return 1
    console.print("Both answers are the same, token for token. Speculation changes speed alone.")
    return 0


def _prompt(config: DemoConfig, assembled: Assembled) -> Prompt:
    """Return the question as a chat, or as text for a model without a chat template."""
    if assembled.tokenizer.chat_template is None:
        return config.prompt
    return [{"role": "user", "content": config.prompt}]


def _ask(
    client: Client,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    is_speculative: bool,
    console: Console | None = None,
) -> Measured:
    """Take the likeliest answer; show it as it comes if there is a console to show it on."""
    started = time.perf_counter()
    first_seconds = 0.0
    events = []
    for event in client.stream(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        enabled=is_speculative,
        use_prefix_cache=False,
    ):
        events.append(event)
        if event.HasField("delta"):
            first_seconds = first_seconds or time.perf_counter() - started
            if console is not None:
                console.out(event.delta.text, end="", highlight=False)
    seconds = time.perf_counter() - started
    return Measured(to_response(events).answers[0], seconds, first_seconds)


def _table(rows: Sequence[tuple[str, Measured]]) -> Table:
    table = Table(
        *("speculation", "tokens", "seconds", "to the first", "tokens/s", "tau"),
        caption="seconds: from sending the request to its last token, on the client's clock. tau: mean "
        "tokens per pass of the model, the bonus token included; plain decoding is 1.00. Rewriting repeats "
        "its prompt, which suits drafts from earlier text; other work gains less. `headway bench "
        "engine` measures several kinds.",
    )
    for name, measured in rows:
        table.add_row(
            name,
            str(measured.num_tokens),
            f"{measured.seconds:.2f}",
            f"{measured.first_token_seconds:.2f}",
            f"{measured.tokens_per_second:.1f}",
            f"{measured.tau:.2f}",
        )
    return table
