"""The paper's tables as data: settings that it reports as best, grids that it searched, results that it prints.

`paper_settings("bi2clip", "QNLI")` gives what `algorithm("bi2clip", ...)` takes; `grid` and `points` give the sweeps;
`results("glue")` the printed numbers. Misprints are corrected unless one asks for what is printed.
"""

from tailopt.paper.grids import Lower, grid, points
from tailopt.paper.settings import pairs, paper_settings
from tailopt.paper.tables import results

__all__ = ["Lower", "grid", "pairs", "paper_settings", "points", "results"]
