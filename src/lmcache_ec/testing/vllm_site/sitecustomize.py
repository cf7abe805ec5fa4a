"""Let PyPI's torchvision, a CUDA build, be imported beside a CPU build of torch.

Its compiled part cannot be loaded there, so two operators that its Python part extends do not
exist, and the import fails. Declaring them is enough: nobody here calls them. Python imports this
module at start when its folder is on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_libraries: list[object] = []  # a declaration lasts as long as its library object


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators when torchvision is first imported; torch is too slow to load here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if not importlib.metadata.version("torchvision").endswith("+cpu"):
                _declare_operators()
        return None


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)
    _libraries.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
