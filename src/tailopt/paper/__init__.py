"""The paper's tables as data: the settings it reports as best, the grids it searched, the results it prints.

`paper_settings("bi2clip", "QNLI")` returns keywords of `algorithm("bi2clip", ...)`; `grid` and `points` return the
sweeps, `results("glue")` the printed numbers. Misprints are corrected unless the printed values are requested.
"""

from tailopt.paper.best_settings import pairs, paper_settings
from tailopt.paper.grids import Lower, grid, points
from tailopt.paper.printed_tables import results

__all__ = ["Lower", "grid", "pairs", "paper_settings", "points", "results"]
