"""Problems to try an optimizer on. `Task` and `Defaults` are what a task of your own follows."""

from tailopt.tasks.task import Defaults, Task

__all__ = ["Defaults", "Task"]
