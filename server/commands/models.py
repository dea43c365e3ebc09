"""`headway models pull`, `models list` and `models quantize`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table

from headway.engine.config import EngineConfig, Quantize
from headway.engine.errors import UsageError
from headway.engine.models import store
from headway.engine.models.load import pack_weights
from headway.engine.models.pack_model import PackedModel
from headway.kernels.cpu.levels import KernelChoice
from headway.server.commands.progress import progress_bars
from headway.server.quantize_report import Report, measure
from headway.server.settings import POSITIONAL


@dataclass(frozen=True, slots=True)
class PullConfig:
    """Get a model of the catalogue."""

    name: Annotated[str, POSITIONAL] = store.DEFAULT_MODEL
    """Which one; `headway models list` shows them all."""


@dataclass(frozen=True, slots=True)
class ListConfig:
    """List the models of the catalogue."""

    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """Pack a model's weights, and measure the cost.

    What is packed is kept in the cache, where `serve --engine.quantize` finds it. With --report the
    perplexity of a text is measured three times: with the weights in float32, with packed weights, and
    with packed weights and rounded activations, which is how a CPU serves.
    """

    model: Annotated[str, POSITIONAL] = store.DEFAULT_MODEL
    """A name of `headway models list`, a folder, a .gguf file or a Hugging Face name."""
    to: Literal["auto", "int8", "int4"] = "auto"
    """Bits of a weight; auto keeps those of a quantised GGUF file and rounds float weights to int8."""
    report: Path | None = None
    """Text file, UTF-8, of which perplexity is measured; some ten thousand words tell much."""
    window_tokens: int = 512
    """Tokens that the model sees at once."""
    stride_tokens: int = 256
    """Tokens from one window to the next; those that are seen again are not counted again."""
    num_threads: int = 0
    """CPU threads; 0 takes every core that this process may use."""
    kernels: KernelChoice = "auto"
    """Bodies of the CPU kernels that packed weights are measured with, as of `serve`."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        if not 0 < self.stride_tokens < self.window_tokens:
            raise ValueError(
                f"stride_tokens is {self.stride_tokens} and window_tokens {self.window_tokens}; a "
                "stride is at least 1 and less than a window"
            )


def pull(config: PullConfig) -> int:
    """Download a model, unless it is here, and print where it is."""
    with progress_bars(Console(stderr=True)) as report:
        path = store.pull(config.name, report)
    print(path)
    return 0


def list_models(config: ListConfig) -> int:
    """Print name, size, licence and state of every known model."""
    listings = store.list_models()
    if config.json:
        print(json.dumps([asdict(listing) for listing in listings], indent=2, default=str))
        return 0
    table = Table("name", "model", "MB", "licence", "state", "path")
    for listing in listings:
        table.add_row(
            listing.name,
            listing.title,
            f"{listing.num_bytes / 1e6:.0f}",
            listing.licence,
            listing.state,
            str(listing.path) if listing.state == "pulled" else "",
        )
    Console().print(table)
    return 0


def quantize(config: QuantizeConfig) -> int:
    """Pack, print sizes, and measure if a text is given."""
    text = None if config.report is None else _read_text(config.report)
    console = Console(stderr=True)
    with progress_bars(console) as progress:
        path = store.resolve(config.model, progress)
        quantize: Quantize = "none" if config.to == "auto" else config.to
        packed = pack_weights(path, quantize, progress)
        if packed is None:
            quantize = "int8"
            packed = pack_weights(path, quantize, progress)
    assert packed is not None
    report = None
    if text is not None:
        report = measure(
            str(path),
            quantize,
            text,
            config.window_tokens,
            config.stride_tokens,
            EngineConfig(num_threads=config.num_threads, kernels=config.kernels),
            console,
        )
    if config.json:
        sizes = {"source_bytes": _source_bytes(path), "packed_bytes": packed.file.stat().st_size}
        measured = None if report is None else asdict(report)
        record = {"model": config.model, "quantize": quantize, **sizes, "report": measured}
        print(json.dumps(record, indent=2))
    else:
        _print_sizes(path, packed)
        if report is not None:
            _print_report(report)
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _source_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def _print_sizes(path: Path, packed: PackedModel) -> None:
    print(f"{path}: {_source_bytes(path) / 1e6:.1f} MB of weights")
    print(
        f"{packed.file}: {packed.file.stat().st_size / 1e6:.1f} MB, {packed.num_weights:,} weights"
    )
    counts = ", ".join(f"{count} {format}" for format, count in packed.formats.items())
    print(f"matrices by format: {counts}")


def _print_report(report: Report) -> None:
    table = Table("weights", "activations", "perplexity", "against float32")
    for each in report.perplexities:
        change = each.perplexity / report.perplexities[0].perplexity - 1
        table.add_row(each.weights, each.activations, f"{each.perplexity:.4f}", f"{change:+.2%}")
    Console().print(table)
    print(
        f"{report.num_tokens:,} tokens counted, in windows of {report.window_tokens} with a stride of "
        f"{report.stride_tokens}"
    )
