"""What every study promises about `--quick`: it says that nothing is judged, and writes no verdict anywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tailopt.studies.protocol import UNJUDGED

VERDICT = re.compile(r"\*\*(Claim|Rate)|does not hold|cannot tell|\bholds\b|as claimed|at most the|more than the")


def assert_unjudged(out: Path) -> None:
    page = (out / "table.md").read_text(encoding="utf-8")
    assert UNJUDGED in page
    said = [line for line in page.splitlines() if VERDICT.search(line) and not line.startswith("- Slope:")]
    assert said == []
    assert [*verdicts(json.loads((out / "results.json").read_text(encoding="utf-8")))] == []


def verdicts(found: Any) -> list[Any]:
    """Everything in results.json that judges: a verdict, whether something holds, whether it is within a bound."""
    if isinstance(found, list):
        return [each for part in found for each in verdicts(part)]
    if not isinstance(found, dict):
        return []
    own = [found[key] for key in ("verdict", "holds", "within", "claim", "claims") if found.get(key)]
    return own + [each for part in found.values() for each in verdicts(part)]
