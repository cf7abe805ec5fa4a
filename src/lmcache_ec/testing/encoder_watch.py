"""Counts what a vLLM worker really encodes, by wrapping its model's own encoder call.

vLLM mixes the class into its worker (``--worker-extension-cls``) and calls its methods by name
(``collective_rpc``), in whatever process the worker runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class EncoderWatch:
    """The counter of one worker. Used from the worker's own thread."""

    _watched_items: int

    def watch_encoder(self) -> None:
        """Count from now on; called once, so that vLLM's own trial runs at start do not count."""
        model = self.get_model()  # type: ignore[attr-defined]  # the worker's
        encode = model.embed_multimodal
        self._watched_items = 0

        def counted(**inputs: Any) -> Tensor | Sequence[Tensor]:  # noqa: ANN401  the model's own
            outputs: Tensor | Sequence[Tensor] = encode(**inputs)
            self._watched_items += len(outputs)
            return outputs

        model.embed_multimodal = counted

    def take_encoded_items(self) -> dict[str, int]:
        """How many images, videos and clips this worker encoded since it was last asked."""
        items, self._watched_items = self._watched_items, 0
        return {"items": items}
