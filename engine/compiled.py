"""CompiledStep: the model's pass as one native program. The eager pass in runner.py is its oracle.

Knows how ForwardInput becomes the program's inputs; the compiler knows how to make the program.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from headway.compiler import capture as capture_module
from headway.compiler import graph as graph_module
from headway.compiler import graph_file
from headway.compiler.capture import MODULE_PREFIX, capture
from headway.compiler.graph import Graph, Unsupported
from headway.compiler.graph_file import load_graph, save_graph
from headway.compiler.step import compile_graph
from headway.engine import runner as runner_module
from headway.engine.batch import ForwardInput, ForwardOutput
from headway.engine.config import MAX_NODES, EngineConfig
from headway.engine.kv_cache import KVCache
from headway.engine.models import attention, packed_modules
from headway.engine.runner import output_projection
from headway.kernels import ops
from headway.kernels.cache import cache_folder
from headway.kernels.cpu.library import Team

logger = logging.getLogger(__name__)

_SOURCES = (
    __file__,
    *(module.__file__ for module in (capture_module, graph_module, graph_file, ops)),
    *(module.__file__ for module in (attention, packed_modules, runner_module)),
)
"""The code of ours that is traced, or traces: a graph in the cache depends on it."""

_OPEN_SIZES = {
    **{name: {0: "T"} for name in ("token_ids", "positions", "slots", "tree_masks")},
    "cu_lengths": {0: "num_lengths"},
    **{name: {0: "S"} for name in ("context_lengths", "span_lengths")},
    "block_tables": {0: "S", 1: "P"},
    "logit_rows": {0: "R"},
}
"""T rows, S sequences, P blocks of the longest, R rows with logits: known when a step runs."""


class _Pass(torch.nn.Module):
    """What is captured: tensors of a ForwardInput by name -> hidden states and logits."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        super().__init__()
        untyped: Any = model
        self.model = model
        self._decoder = untyped.get_decoder()
        self._project = output_projection(model)
        self.block_size = cache.block_size

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: inputs[name] for name in _OPEN_SIZES}
        cache: Any = _CacheView(inputs["cache"], inputs.get("scales"), self.block_size)
        hidden = self._decoder(
            input_ids=inputs["token_ids"][None],
            position_ids=inputs["positions"][None],
            use_cache=False,
            forward_input=ForwardInput(**tensors, needs_logits=True, cache=cache),
        ).last_hidden_state[0]
        return {"hidden": hidden, "logits": self._project(hidden[inputs["logit_rows"]])}


class _CacheView:
    """As much of a KVCache as attention reads while it is traced."""

    team = None

    def __init__(self, data: torch.Tensor, scales: torch.Tensor | None, block_size: int) -> None:
        self.data = data
        self.scales = scales
        self.block_size = block_size


class CompiledStep:
    """Runs a model's pass in one native call."""

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, config: EngineConfig, team: Team
    ) -> None:
        """Capture and compile. Raises compiler.graph.Unsupported if the model cannot be."""
        bound = {"cache": cache.data}
        if cache.scales is not None:
            bound["scales"] = cache.scales
        graph = _graph(_Pass(model, cache), _example() | bound)
        # Warming up times passes of as many rows as a tree has, however small a step may be later.
        most = max(config.max_batch_tokens, MAX_NODES)
        self._program = compile_graph(graph, bound, {"T": most, "R": most}, team)
        if "best_ids" not in self._program.outputs:
            raise Unsupported("its output head is no product that is at most soft-capped")
        # Rounding to int8 can fall to the other side of a half by the last bit of a sum, and modules
        # of 16 bits round in every layer what is computed in float32 here.
        rounds = model.dtype.itemsize < 4 or any(node["int8"] for node in graph.nodes)
        self.max_difference = 0.2 if rounds else 1e-2
        self._vocab_size: int = model.config.get_text_config().vocab_size

    def forward(self, forward_input: ForwardInput) -> ForwardOutput:
        """Compute every row, write its keys and values to the cache.

        `hidden` and the best tokens are views that the next call overwrites.
        """
        inputs: dict[str, torch.Tensor] = {
            name: getattr(forward_input, name) for name in _OPEN_SIZES
        }
        num_rows, num_logits = len(forward_input.token_ids), len(forward_input.logit_rows)
        num_sequences, num_blocks = forward_input.block_tables.shape
        logits = None
        if forward_input.needs_logits:
            logits = inputs["logits"] = torch.empty(num_logits, self._vocab_size)
        sizes = {"T": num_rows, "R": num_logits, "S": num_sequences, "P": num_blocks}
        self._program.run(sizes, inputs)
        return ForwardOutput(
            best_ids=self._program.output("best_ids", num_logits)[:, 0],
            best_values=self._program.output("best_values", num_logits)[:, 0],
            logits=logits,
            hidden=self._program.output("hidden", num_rows),
        )


def _example() -> dict[str, torch.Tensor]:
    """Inputs to trace with: shapes matter, values do not. Open sizes are apart from one another."""
    rows = {name: torch.zeros(7, dtype=torch.int64) for name in ("token_ids", "positions", "slots")}
    return {
        **rows,
        "tree_masks": torch.zeros(7, dtype=torch.int64),
        "cu_lengths": torch.zeros(4, dtype=torch.int32),
        "context_lengths": torch.zeros(3, dtype=torch.int32),
        "span_lengths": torch.zeros(3, dtype=torch.int32),
        "block_tables": torch.zeros(3, 5, dtype=torch.int32),
        "logit_rows": torch.zeros(6, dtype=torch.int64),
    }


def _graph(module: _Pass, example: Mapping[str, torch.Tensor]) -> Graph:
    """What the module computes, from the cache if it was traced before."""
    named = [
        *module.named_buffers(remove_duplicate=False),
        *module.named_parameters(remove_duplicate=False),
    ]
    tensors: dict[str, torch.Tensor] = {f"{MODULE_PREFIX}{name}": each for name, each in named}
    path = cache_folder() / "graphs" / f"{_key(module, example, tensors)}.json"
    try:
        return load_graph(path, tensors)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the graph in %s cannot be read and is traced anew: %s", path, error)
    graph = capture(module, example, _OPEN_SIZES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_graph(graph, tensors, path)
    except (OSError, ValueError) as error:
        logger.info("the model is traced at each start, because %s", error)
    return graph


def _key(
    module: _Pass, example: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> str:
    """A name for everything that the graph depends on."""
    named = {**example, **tensors}
    parts = [
        torch.__version__,
        transformers.__version__,
        module.model.config.to_json_string(use_diff=False),
        *(f"{name} {tuple(each.shape)} {each.dtype}" for name, each in named.items()),
        *(f"{name} {each}" for name, each in module.named_modules() if not any(each.children())),
        str(module.block_size),
        *(Path(str(source)).read_text() for source in _SOURCES),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
