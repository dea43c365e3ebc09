"""NativeBranches: Hydra heads as one native program a level, on the threads of the engine.

Weights of the heads are rounded to q8 (kernels/packed.py), and so is the output head of a target of
floats; a packed one is read as it is. What is multiplied with them is rounded to int8, whatever the
target does. So drafts may differ from those of TorchBranches where two tokens are near one another;
what is served does not.

Letters: N rows (branches), H hidden size, L levels left, D tokens that may be drafted.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from headway.draft_heads.branches import Guesses
from headway.draft_heads.hydra import HydraHeads
from headway.draft_heads.level_program import Call, Program, pointwise, product, quantise
from headway.engine.models.packed_modules import PackedEmbedding, PackedLinear
from headway.kernels.cpu.library import Team
from headway.kernels.linear import ROW_GROUP, row_bytes
from headway.kernels.memory import gather
from headway.kernels.pack import pack
from headway.kernels.packed import FORMATS, PackedWeight
from headway.kernels.pointwise import BINARY, UNARY


class NativeBranches:
    """Implements branches.Branches on a team.

    Level 0 multiplies [h ; E(root)], 2 H numbers, with the first two `inputs` of HydraHeads at once;
    level i > 0 E(token) with the next, and adds its parent's sums. The program of a level is

        E(token) -> int8 -> sums [N, L, 2, H] -> z = R u + silu(A u) -> int8 -> best of D

    Programs are made when first wanted, with memory for some rows, and then only told how many rows
    there are.
    """

    def __init__(self, heads: HydraHeads, team: Team) -> None:
        """Pack the weights; `heads` need not be kept. Raises ValueError for weights not finite."""
        self._team = team
        self._size = heads.config.hidden_size
        self._embed = heads.ends.embed
        self._draft_ids = None if heads.draft_ids is None else heads.draft_ids.numpy()
        places = [each.get_parameter("weight").detach() for each in heads.inputs]
        inputs = [pack(each, "q8") for each in (torch.cat(places[:2], dim=1), *places[2:])]
        self._bias = heads.inputs[0].get_parameter("bias").detach().float().contiguous()
        outputs = [_Output.of(each) for each in heads.outputs or [heads.ends.head]]
        if heads.draft_ids is None and isinstance(heads.ends.head, PackedLinear):
            self._inputs, self._outputs = _gathered(inputs), outputs  # the model's own stays one
        else:
            weights = _gathered([*inputs, *(each.weight for each in outputs)])
            self._inputs = weights[: len(inputs)]
            self._outputs = [
                each._replace(weight=weight)
                for each, weight in zip(outputs, weights[len(inputs) :], strict=True)
            ]
        self._softcap = 0.0 if heads.outputs else heads.ends.softcap or 0.0
        self._memory = _Memory(0, self._size, len(self._inputs))
        self._programs: dict[tuple[int, int, int], Program] = {}
        self._level = self._num_levels = self._num_best = 0

    def begin(self, hidden: Tensor, root_ids: Seq[int], num_levels: int, num_best: int) -> Guesses:
        """See branches.Branches."""
        self._level, self._num_levels, self._num_best = 0, num_levels, num_best
        self._make_room(len(root_ids))
        self._memory.inputs[: len(root_ids), : self._size] = hidden
        return self._run(root_ids)

    def extend(self, parents: Seq[int], token_ids: Seq[int]) -> Guesses:
        """See branches.Branches."""
        self._make_room(len(token_ids))
        num_left = self._num_levels - self._level
        before = self._memory.sums(self._level, num_left)
        self._level += 1
        after = self._memory.sums(self._level, num_left - 1)
        after[: len(parents)] = before[parents, 1:]
        return self._run(token_ids)

    def _run(self, token_ids: Seq[int]) -> Guesses:
        key = self._level, self._num_levels, self._num_best
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile()
        num_rows = len(token_ids)
        self._memory.ids[:num_rows] = token_ids
        if not isinstance(self._embed, PackedEmbedding):
            with torch.inference_mode():
                self._embeddings()[:num_rows] = self._embed(
                    torch.from_numpy(self._memory.ids[:num_rows])
                )
        program.run(self._team, num_rows)
        places = program.indices[:num_rows]
        chances = np.exp(program.values[:num_rows] - program.log_sums[:num_rows, None])
        best = places if self._draft_ids is None else self._draft_ids[places]
        return Guesses(best.tolist(), chances.tolist())

    def _make_room(self, num_rows: int) -> None:
        """Have memory for some rows; sums that were computed stay."""
        if num_rows <= self._memory.num_rows:
            return
        memory = _Memory(max(8, 2 * num_rows), self._size, len(self._inputs))
        memory.keep(self._memory, self._level, self._num_levels - self._level)
        self._memory = memory
        self._programs.clear()

    def _embeddings(self) -> Tensor:
        """Where a level's embeddings go: [rows, H], behind the hidden states in level 0."""
        first = 0 if self._level else self._size
        return self._memory.inputs[:, first : first + self._size]

    def _compile(self) -> Program:
        """Make the program of the level that is to run."""
        output = self._outputs[self._level if len(self._outputs) > 1 else 0]
        program = Program(self._memory.num_rows, self._num_best, output.weight, self._team)
        program.encode(self._team, [*self._sum_up(), *self._project(output, program)])
        return program

    def _sum_up(self) -> list[Call]:
        """Calls that make z of the token ids and the parents' sums."""
        memory, size = self._memory, self._size
        num_left = self._num_levels - self._level
        sums = torch.from_numpy(memory.sums(self._level, num_left))
        weight = self._inputs[self._level]
        num_sums = num_left * 2 * size
        calls: list[Call] = []
        if isinstance(self._embed, PackedEmbedding):
            embed = {
                "ids": torch.from_numpy(memory.ids), "weight": self._embed.data, "scale": self._embed.scale,
                "format": FORMATS[self._embed.format].number, "num_inputs": size,
                "out": self._embeddings(), "out_stride": 2 * size,
            }  # fmt: skip
            calls.append(("embedding", {"num_rows": 0, **embed}))
        sum_up = {
            # Heads to come that no level of this draft reaches are the last outputs.
            **product(memory.rounded, weight), "num_outputs": num_sums,
            "out": sums, "out_stride": num_sums, "activation": 0,
            "bias": None if self._level else self._bias,
            "residual": sums if self._level else None, "residual_stride": num_sums,
        }  # fmt: skip
        features = memory.features
        return [
            *calls,
            quantise(memory.inputs, weight.num_inputs, memory.rounded),
            ("linear", sum_up),
            pointwise(UNARY["silu"], features, sums[:, 0, 1]),
            pointwise(BINARY["add"], features, features, sums[:, 0, 0]),
        ]

    def _project(self, output: "_Output", program: Program) -> list[Call]:
        """Calls that rank the tokens."""
        memory = self._memory
        calls: list[Call] = []
        rows = memory.features
        if FORMATS[output.weight.format].scale_bytes:
            calls.append(quantise(rows, self._size, memory.rounded))
            rows = memory.rounded
        head = {
            **product(rows, output.weight), "bias": output.bias, "softcap": self._softcap,
            "logits": None, "logits_stride": 0, "num_top": self._num_best,
            **program.results(),
        }  # fmt: skip
        return [*calls, ("output_head", head)]


class _Output(NamedTuple):
    """A vocabulary projection as the native kernel wants it."""

    weight: PackedWeight
    bias: Tensor | None

    @classmethod
    def of(cls, head: nn.Module) -> "_Output":
        bias = head.bias
        assert bias is None or isinstance(bias, Tensor)
        bias = None if bias is None else bias.detach().float().contiguous()
        if isinstance(head, PackedLinear):
            return cls(head.weight, bias)
        return cls(pack(head.get_parameter("weight").detach(), "q8"), bias)


def _gathered(weights: Seq[PackedWeight]) -> list[PackedWeight]:
    """Copy weights into one memory, on huge pages where there are some."""
    copies = gather([weight.data for weight in weights])
    return [replace(weight, data=copy) for weight, copy in zip(weights, copies, strict=True)]


class _Memory:
    """What the programs work on, with room for `num_rows` branches."""

    def __init__(self, num_rows: int, size: int, num_heads: int) -> None:
        self.num_rows = num_rows
        self._size = size
        # Arrays where Python reads or writes in each level: numpy costs a few microseconds less.
        self.ids = np.zeros(num_rows, np.int64)
        self.inputs = torch.zeros(num_rows, 2 * size)
        """[h ; E] in level 0, then E alone in front."""
        self.features = torch.zeros(num_rows, size)
        num_bytes = -(-num_rows // ROW_GROUP) * ROW_GROUP * row_bytes(2 * size)
        self.rounded = torch.zeros(num_bytes, dtype=torch.uint8)
        self._sums = [
            np.zeros(num_rows * left * 2 * size, np.float32) for left in range(num_heads, 0, -1)
        ]

    def sums(self, level: int, num_left: int) -> npt.NDArray[np.float32]:
        """The running sums of a level and those that follow: [rows, num_left, 2, H]."""
        flat = self._sums[level][: self.num_rows * num_left * 2 * self._size]
        return flat.reshape(self.num_rows, num_left, 2, self._size)

    def keep(self, old: "_Memory", level: int, num_left: int) -> None:
        """Take over the sums of one level."""
        if num_left > 0:
            self.sums(level, num_left)[: old.num_rows] = old.sums(level, num_left)
