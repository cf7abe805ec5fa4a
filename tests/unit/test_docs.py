"""What the documents say of the tests is true."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_a_document_names_exists() -> None:
    sources = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "src").rglob("*_suite.py")]
    defined = {
        name
        for path in sources
        for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
    }
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/tested-cases.md").read_text("utf-8")))
    assert len(named) > 30
    assert named <= defined, sorted(named - defined)
