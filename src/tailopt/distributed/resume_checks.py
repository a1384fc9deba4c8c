"""What a user's own loop may have forgotten to restore when it resumes: the scheduler, and the position in the data.

Neither can be seen in a checkpoint alone, so the first steps after a resume are looked at:

    rates    a learning rate that is nearer to that of a fresh optimizer than to the checkpoint's
    inputs   a first batch that is the first batch of the whole run, where the first two rounds began differently

Both are warnings: a schedule may restart on purpose, and data may repeat.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LIMIT = 1 << 20  # bytes of a tensor that are looked at
STEPS = 2  # after a resume, in which learning rates are compared: a scheduler that was built before acts in the second


class Rates:
    """Compares learning rates after a resume with those of the checkpoint."""

    def __init__(self, of_a_new_run: Sequence[float], saved: Sequence[float]) -> None:
        self._of_a_new_run, self._saved = list(of_a_new_run), list(saved)
        self._left = STEPS if self._of_a_new_run != self._saved else 0

    def check(self, optimizer: Optimizer) -> None:
        """Warn where a group steps with the rate of a new run."""
        if not self._left:
            return
        self._left -= 1
        each = zip(rates(optimizer), self._of_a_new_run, self._saved, strict=False)
        for k, (now, new, saved) in enumerate(each):
            if now != saved and abs(now - new) < abs(now - saved):
                self._left = 0
                warnings.warn(
                    f"The learning rate of group {k} is {now:g} in the first steps after the resume; it was {saved:g} "
                    f"in the checkpoint, and is {new:g} in a new run. Was the scheduler restored? Keep its "
                    "state_dict() in `extra`, and build it before the NestedOptimizer, which restores the rates.",
                    UserWarning,
                    stacklevel=4,
                )
                return


def rates(optimizer: Optimizer) -> list[float]:
    """The learning rate of every group; NaN where a group has none."""
    return [float(group.get("lr", float("nan"))) for group in optimizer.param_groups]


class FirstInputs:
    """Digests the first inputs of the first two rounds and of the first step after a resume.

    The digest is formed where the inputs are and read at the end of the round, so that a GPU is not waited for.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        first: Sequence[int] = (),
        resumed: bool = False,
        in_the_middle: bool = False,
    ) -> None:
        self._first = list(first)  # of the first two rounds in which this node took part
        self._resumed = resumed
        self._known = in_the_middle  # whether the first inputs of this round were looked at before the resume
        self._in_own_round = False
        self._armed = False
        self._pending: Tensor | None = None  # a digest that has not been read yet
        self._handle: Any = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def begin(self) -> None:
        """A round of this node begins."""
        self._in_own_round = True
        self._armed = self._handle is not None

    @property
    def first(self) -> list[int]:
        """The digests of the first two rounds, as far as they are known: what a checkpoint keeps."""
        if self._pending is None or self._known or len(self._first) == 2:
            return list(self._first)
        return [*self._first, int(self._pending)]

    def end(self, t: int) -> None:
        """Read what was looked at in a round; in a round of other nodes there was nothing to look at."""
        if self._handle is None or not self._in_own_round:
            return
        self._in_own_round, self._armed = False, False
        digest = int(self._pending) if self._pending is not None else None
        first, self._first = self._first, self.first
        if digest is not None and self._resumed and len(first) == 2 and first[0] != first[1] and digest == first[0]:
            warnings.warn(
                f"The data start again: the first inputs after the resume (round {t}) are those of the first "
                "round. Restore the position in the data: keep it in `extra`, and read it from `resumed.extra`.",
                UserWarning,
                stacklevel=4,
            )
        self._pending, self._resumed, self._known = None, False, False
        if len(self._first) == 2:  # from here on the model runs without the hook
            self._handle.remove()
            self._handle = None

    def _look(self, module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._armed or not torch.is_grad_enabled():
            return
        self._armed = False
        with contextlib.suppress(RuntimeError, TypeError):  # inputs that cannot be read as bytes are not compared
            self._pending = _digest([*_tensors(inputs), *_tensors(keywords)])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


@torch.no_grad()
def _digest(tensors: Sequence[Tensor]) -> Tensor | None:
    """A number that depends on the bytes of tensors and on their places, where the tensors are."""
    total = None
    for k, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)[: LIMIT // tensor.element_size()].contiguous()
        words = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(1, words.numel() + 1, device=words.device) * 0x9E3779B97F4A7C1 + k
        part = ((words + 1) * places).sum()
        total = part if total is None else total * 31 + part.to(total.device)
    return total
