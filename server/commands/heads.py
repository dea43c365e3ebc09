"""`headway heads train`: draft heads for a model, learnt from a file of chats."""

from rich.console import Console

from headway.draft_heads.config import HeadsTrainConfig
from headway.draft_heads.train import train_heads
from headway.engine.build import resolve_device, resolve_dtype
from headway.engine.config import EngineConfig
from headway.engine.models.load import load_model
from headway.engine.models.tokenizer import load_tokenizer
from headway.server.commands.progress import progress_bars


def train(config: HeadsTrainConfig) -> int:
    """Train, and tell how well the heads draft text that they have not seen."""
    console = Console(stderr=True)
    where = EngineConfig(dtype=config.dtype, device=config.device)
    with progress_bars(console) as report_bytes:
        loaded = load_model(
            config.model,
            resolve_dtype(where),
            resolve_device(where),
            keep_packed=False,  # gradients reach the heads through the output head
            progress=report_bytes,
        )
    report = train_heads(loaded.model, load_tokenizer(loaded.path), config, console)
    accuracies = ", ".join(f"{value:.2f}" for value in report.best.accuracy)
    print(
        f"{config.out}: tau {report.best.tau:.2f} on held-out chats (simulated; plain decoding is"
    )
    print(f"1.00); share of first guesses that were right, by depth: {accuracies}.")
    print(f"{report.num_steps} steps, {report.num_rows:,} positions, {report.seconds:.0f} s.")
    print(
        f"Drafts are among {report.num_draft_tokens:,} tokens, {report.coverage:.1%} of what held-out "
        f"answers use; {report.num_left_out:,} labels lay outside and were not learnt."
    )
    if report.num_skipped_chats:
        print(f"{report.num_skipped_chats} chats were skipped: no answer within max_chat_tokens.")
    return 0
