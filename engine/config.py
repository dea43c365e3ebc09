"""The engine's settings. Each docstring under a field is its help text on the command line."""

from dataclasses import dataclass
from typing import Literal

from headway.kernels.choices import Activations
from headway.kernels.cpu.levels import KernelChoice

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compile = Literal["auto", "off"]
CacheDtype = Literal["auto", "float32", "bfloat16", "int8"]
Quantize = Literal["none", "int8", "int4"]

MAX_NODES = 64
"""Nodes of a draft tree, the root included: an ancestor mask is one 64-bit word."""

MAX_THREADS = 1024
"""More than this torch's thread pool may fail to start, and then the process crashes."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine computes, how much it holds and how much it takes on."""

    dtype: Dtype = "auto"
    """Type of weights and activations; auto is float32 on a CPU and bfloat16 on a GPU."""
    quantize: Quantize = "none"
    """Round float weights to 8 or 4 bits, on CPUs alone; GGUF's quantised weights stay as they are."""
    activations: Activations = "int8"
    """What products with quantised weights do to inputs: int8 rounds them by blocks of 32, fp32 not."""
    device: str = "auto"
    """Where the model runs: cpu, cuda, cuda:1; auto takes a GPU where there is one."""
    num_threads: int = 0
    """CPU threads for the model; 0 takes every core that this process may use."""
    pin_threads: bool = False
    """Tie each CPU thread but the engine's own to one core; for machines that serve nothing else."""
    kernels: KernelChoice = "auto"
    """Bodies of the CPU kernels: plain torch (reference), or C++ for an instruction set; auto takes
    the best that this machine can run and compile, and the reference where there is none."""
    compile: Compile = "auto"
    """Run the model as one native program where the native kernels serve it (auto), or module by
    module (off)."""
    block_size: int = 16
    """Tokens in one block of the KV cache."""
    kv_cache_bytes: int = 0
    """Memory for the KV cache; 0 takes a quarter of what is free, 4 GiB at most on a CPU."""
    kv_cache_dtype: CacheDtype = "auto"
    """Type of cached keys and values; int8, with a scale for each head of a token, holds 3 to 4 times
    as many tokens as float32 and rounds them; auto is bfloat16 where products round their inputs, and
    else the model's own type."""
    max_context_tokens: int = 0
    """Longest prompt plus answer; 0 is the model's own limit."""
    max_batch_tokens: int = 512
    """Tokens computed in one step over all sequences: prompt chunks, roots and drafts."""
    max_chunk_tokens: int = 256
    """Tokens of one prompt computed in one step; a shorter chunk shares steps more evenly."""
    max_running_requests: int = 32
    """Sequences that hold cache blocks at the same time; more wait in the queue."""
    max_queued_requests: int = 256
    """Requests that may wait; one more is refused with RESOURCE_EXHAUSTED."""
    max_queued_prompt_tokens: int = 262_144
    """Prompt tokens that may wait; a bound on the time to first token."""
    prefix_cache: bool = True
    """Share the blocks of equal prompt prefixes between requests."""
    max_draft_tokens: int = 8
    """Nodes drafted for one sequence in one step, 63 at most; 0 turns speculation off."""
    adaptive_drafts: bool = True
    """Verify only drafts that measured step times make worthwhile; otherwise all that are proposed."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that cannot work together."""
        if not 0 <= self.max_draft_tokens < MAX_NODES:
            raise ValueError(
                f"max_draft_tokens is {self.max_draft_tokens}; 0 to {MAX_NODES - 1} are allowed, since "
                f"an ancestor mask has {MAX_NODES} bits"
            )
        least = {
            "block_size": 1,
            "max_chunk_tokens": 1,
            "max_running_requests": 1,
            "max_queued_requests": 1,
            "num_threads": 0,
            "kv_cache_bytes": 0,
            "max_context_tokens": 0,
            "max_queued_prompt_tokens": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if self.num_threads > MAX_THREADS:
            raise ValueError(
                f"num_threads is {self.num_threads}; at most {MAX_THREADS} are allowed, and more than "
                "there are cores only slow it down"
            )
        if self.max_batch_tokens <= self.max_running_requests:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; it must be more than "
                f"max_running_requests ({self.max_running_requests}), so that prompts get a turn "
                "beside sequences that decode"
            )
