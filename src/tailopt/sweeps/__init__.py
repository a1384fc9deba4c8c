"""Search for settings: sweeps over grids and Sobol points, random search, and the spaces they look in.

`tailopt.sweep` is the way in; `Range` is an interval of its space.
"""

from tailopt.sweeps.space import Range

__all__ = ["Range"]
