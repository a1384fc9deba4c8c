"""What is told of a run while it goes on: one protocol, for simulations, real nodes, sweeps and the command line.

protocol.py      `Logger`, `RunStart`; a function of a row of the history is a logger too
row_numbers.py   a row of the history as numbers by name
event_files.py   `TensorBoard`
wandb_runs.py    `WandB`
named.py         loggers by the names that the command line takes
"""

from tailopt.loggers.event_files import TensorBoard
from tailopt.loggers.protocol import Logger, RunStart
from tailopt.loggers.row_numbers import row_numbers, row_texts
from tailopt.loggers.wandb_runs import WandB

__all__ = ["Logger", "RunStart", "TensorBoard", "WandB", "row_numbers", "row_texts"]
