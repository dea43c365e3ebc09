"""ModelRunner: one pass of a transformers model over a ForwardInput. Knows no requests."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from headway.engine.batch import ForwardInput, ForwardOutput
from headway.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)


def output_projection(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from last hidden states [..., H] to logits [..., V] float32."""
    untyped: Any = model
    head, softcap = untyped.get_output_embeddings(), logit_softcap(model)

    def project(hidden: torch.Tensor) -> torch.Tensor:
        return bend(head(hidden).float(), softcap)

    return project


def logit_softcap(model: PreTrainedModel) -> float | None:
    """Return what the model bends its logits to; None if it leaves them straight."""
    softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
    return softcap


def bend(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Keep logits within +- softcap, smoothly."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class CompiledPass(Protocol):
    """The same pass, made by a compiler; see compiled.py."""

    max_difference: float
    """What may lie between its logits and the eager ones, as a part of their mean size."""

    def forward(self, forward_input: ForwardInput) -> ForwardOutput:
        """Compute every row, write its keys and values to the cache."""
        ...


class ModelRunner:
    """Runs the decoder over all rows and the output head over those whose logits are wanted.

    With a compiled pass that is what runs, and the model's own modules are its oracle.
    """

    def __init__(self, model: PreTrainedModel, compiled: CompiledPass | None = None) -> None:
        untyped: Any = model
        self.model = untyped
        self.compiled = compiled
        self._decoder = untyped.get_decoder()
        self._project = output_projection(model)

    @torch.inference_mode()
    def forward(self, forward_input: ForwardInput) -> ForwardOutput:
        """Compute every row, write its keys and values to the cache.

        Of a compiled pass the output is good until the next call.
        """
        if self.compiled is not None:
            return self.compiled.forward(forward_input)
        return self._forward(forward_input)

    def _forward(self, forward_input: ForwardInput) -> ForwardOutput:
        hidden = self._decoder(
            input_ids=forward_input.token_ids[None],
            position_ids=forward_input.positions[None],
            use_cache=False,
            forward_input=forward_input,
        ).last_hidden_state[0]
        return ForwardOutput.of(self.project(hidden[forward_input.logit_rows]), hidden)

    @torch.inference_mode()
    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] float32 of hidden states [n, hidden size]."""
        return self._project(hidden)

    @torch.inference_mode()
    def warm_up(self, forward_input: ForwardInput) -> None:
        """Run once, and check that decoder plus `project` is what the model's own class computes.

        A class may scale or bend its logits in ways that `project` does not know, and weights may
        make logits that are not finite. Such a model is refused with ModelLoadError rather than
        served wrong.
        """
        ours = self._forward(forward_input).logits
        theirs = self.model(
            input_ids=forward_input.token_ids[None],
            position_ids=forward_input.positions[None],
            use_cache=False,
            logits_to_keep=forward_input.logit_rows,
            forward_input=forward_input,
        ).logits[0]
        if not theirs.isfinite().all():
            raise ModelLoadError(
                "the model's logits are not finite: its weights hold NaN or infinity, or overflow "
                f"{theirs.dtype}. Get its files anew, or choose a wider dtype"
            )
        difference = (ours - theirs.float()).abs().max().item()
        if not difference <= 1e-3 * max(1.0, theirs.abs().max().item()):
            raise ModelLoadError(
                f"{type(self.model).__name__} computes its logits in a way this server does not know "
                f"(they differ by {difference:.3g}); serve a model of another family"
            )
        self._check_compiled(forward_input, theirs.float())

    def _check_compiled(self, forward_input: ForwardInput, eager: torch.Tensor) -> None:
        """Run the compiled pass, and leave it if its logits are not those of the model's modules."""
        if self.compiled is None:
            return
        compiled = self.compiled.forward(forward_input).logits
        assert compiled is not None
        difference = ((compiled - eager).square().mean() / eager.square().mean()).sqrt().item()
        if not difference <= self.compiled.max_difference:
            self.compiled = None
            logger.warning(
                "compile=off, which is slower, because the compiled logits are %.2g of their size "
                "away from the model's: please report the model's family",
                difference,
            )
