"""ModelRunner: one pass of a transformers model over a ForwardInput. Knows no requests."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from headway.engine.batch import ForwardInput, ForwardOutput
from headway.engine.errors import ModelLoadError


def output_projection(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from last hidden states [..., H] to logits [..., V] float32."""
    untyped: Any = model
    head = untyped.get_output_embeddings()
    softcap: float | None = getattr(model.config, "final_logit_softcapping", None)

    def project(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = head(hidden).float()
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    return project


class ModelRunner:
    """Runs the decoder over all rows and the output head over those whose logits are wanted."""

    def __init__(self, model: PreTrainedModel) -> None:
        untyped: Any = model
        self.model = untyped
        self._decoder = untyped.get_decoder()
        self._project = output_projection(model)

    @torch.inference_mode()
    def forward(self, forward_input: ForwardInput) -> ForwardOutput:
        """Compute every row, write its keys and values to the cache."""
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
        ours = self.forward(forward_input).logits
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
