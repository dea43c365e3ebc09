"""compile_graph: a captured graph -> a program. The compiler's passes stand here in their order."""

from collections.abc import Mapping

import torch

from headway.compiler.graph import Graph
from headway.compiler.lower import lower
from headway.compiler.memory import lives, plan_memory
from headway.compiler.passes.fuse import fuse_rms_norm, fuse_rope, fuse_rotated_attention
from headway.compiler.passes.products import (
    fuse_gates,
    fuse_output_head,
    fuse_residuals,
    join_products,
    pack_weights,
    quantise_inputs,
)
from headway.compiler.passes.simplify import drop_identities, fold_constants, merge_equal
from headway.compiler.placement import place
from headway.compiler.program import Program
from headway.compiler.weights import gather_weights
from headway.kernels.cpu.library import Team
from headway.kernels.memory import allocate

PASSES = (
    fold_constants,
    drop_identities,
    merge_equal,
    fuse_rms_norm,
    fuse_rope,
    pack_weights,
    fuse_gates,
    fuse_residuals,
    join_products,
    fuse_rotated_attention,
    fuse_output_head,
    quantise_inputs,
)


def compile_graph(
    graph: Graph,
    bound: Mapping[str, torch.Tensor],
    max_sizes: Mapping[str, int],
    team: Team,
) -> Program:
    """Optimise a graph, give its values memory, and write it down as calls of kernels.

    bound: inputs that are the same tensor in every step; max_sizes: the most that each open size can
    be. Raises Unsupported where an operation has no lowering.
    """
    graph.check()
    for each in PASSES:
        graph = each(graph)
        graph.check()
    lowered = lower(place(graph), bound, team.num_threads)
    kept = {output.place.buffer for output in lowered.outputs.values()}
    offsets, num_bytes = plan_memory(lives(lowered.calls, lowered.buffers, kept, max_sizes))
    calls = gather_weights(lowered.calls)
    return Program(calls, allocate(num_bytes), offsets, lowered.outputs, max_sizes, team)
