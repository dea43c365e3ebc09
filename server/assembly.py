"""From settings to a model that runs: weights, tokenizer, drafter and engine, put together.

Knows neither gRPC nor the command line; serve, generate, demo and bench all start here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headway.draft_heads.drafter import HydraDrafter
from headway.draft_heads.store import load_heads, read_record
from headway.engine.build import build_engine, resolve_device, resolve_dtype, resolve_team
from headway.engine.config import EngineConfig
from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.engine.models.attention import ATTENTION
from headway.engine.models.cache import Progress, no_progress
from headway.engine.models.load import LoadedModel, load_model
from headway.engine.models.store import DEFAULT_MODEL
from headway.engine.models.tokenizer import load_tokenizer
from headway.engine.stats import StepRecord
from headway.engine.suffix import SuffixDrafter
from headway.engine.tree import Drafter
from headway.kernels.cpu.library import Team
from headway.server.engine_door import ServedModel

DrafterChoice = Literal["suffix", "heads", "off"]
NO_HEADS = "speculation is heads, but no heads are given; name their folder with --heads"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model runs, what drafts for it, and how the engine computes."""

    model: str = DEFAULT_MODEL
    """A name of `headway models list`, a folder, a .gguf file or a Hugging Face name."""
    speculation: Literal["auto", "suffix", "heads", "off"] = "auto"
    """What drafts: repetition of earlier text, draft heads, nothing; auto takes given heads, else suffix."""
    heads: Path | None = None
    """Folder of draft heads that were trained for the model."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.speculation == "heads" and self.heads is None:
            raise ValueError(NO_HEADS)

    @property
    def drafter(self) -> DrafterChoice:
        """What `speculation` comes to."""
        if self.speculation == "auto":
            return "suffix" if self.heads is None else "heads"
        return self.speculation


@dataclass(frozen=True, slots=True)
class Assembled:
    """A loaded model, from which engines can be made: one to serve, or several to compare."""

    settings: ModelSettings
    loaded: LoadedModel
    tokenizer: Any
    team: Team | None
    """Threads for the native kernels; engines of one model share them, a step at a time."""


def assemble(settings: ModelSettings, progress: Progress = no_progress) -> Assembled:
    """Load the model and its tokenizer. Raises ModelLoadError."""
    if settings.heads is not None:
        read_record(settings.heads)  # before the model: a wrong path should not cost a load
    device = resolve_device(settings.engine)
    dtype = resolve_dtype(settings.engine)
    loaded = load_model(
        settings.model,
        dtype,
        device,
        attention=ATTENTION,
        quantize=settings.engine.quantize,
        activations=settings.engine.activations,
        progress=progress,
    )
    team = resolve_team(settings.engine, progress)
    return Assembled(settings, loaded, load_tokenizer(loaded.path), team)


def make_engine(
    assembled: Assembled,
    drafter: DrafterChoice | None = None,
    observe_step: Callable[[StepRecord], None] = lambda record: None,
) -> Engine:
    """Make an engine that drafts as the settings say, or as `drafter` says instead."""
    settings, loaded = assembled.settings, assembled.loaded
    return build_engine(
        loaded.model,
        loaded.eos_token_ids,
        settings.engine,
        _make_drafter(drafter or settings.drafter, assembled),
        observe_step,
        assembled.team,
    )


def make_served(
    assembled: Assembled, observe_step: Callable[[StepRecord], None] = lambda record: None
) -> ServedModel:
    """Make an engine with a thread of its own, not started yet, and give it its tokenizer."""
    engine = make_engine(assembled, observe_step=observe_step)
    return ServedModel(EngineLoop(engine, assembled.loaded.name), assembled.tokenizer)


def _make_drafter(choice: DrafterChoice, assembled: Assembled) -> Drafter | None:
    if choice == "off":
        return None
    if choice == "suffix":
        return SuffixDrafter()
    heads = assembled.settings.heads
    if heads is None:
        raise ValueError(NO_HEADS)
    return HydraDrafter(load_heads(heads, assembled.loaded.model), assembled.team)
