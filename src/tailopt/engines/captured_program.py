"""A function of tensors, traced, compiled, and replayed as one CUDA graph.

    first call     make_fx traces the function on fake tensors, inductor compiles the trace, and the result runs
    second call    its kernels are recorded as one graph, which is replayed
    later calls    the graph is replayed

A graph reads and writes fixed memory. The large inputs are used where they lie, and a graph is recorded again if they
move; the others are copied into memory of the graph. Outputs are overwritten by the next call. Seeds of torch's
generator hold for a replay as for a plain call. On the CPU the compiled function runs, without a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tailopt.engines.memory_plan import is_out_of_memory

TensorFunction = Callable[[list[Tensor]], list[Tensor]]


class CaptureRefused(RuntimeError):
    """A function cannot be traced, compiled or captured; nothing has run yet."""


class CapturedProgram:
    """One function for one set of shapes.

    Args:
        function: (tensors) -> tensors; may write into its first inputs, and must draw from torch's own generator.
    """

    def __init__(self, function: TensorFunction) -> None:
        self._function: TensorFunction | None = function
        self._compiled: Callable[..., Sequence[Tensor]] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._fixed: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._given: list[tuple[Tensor, int]] = []  # what was copied, and its version
        self._outputs: list[Tensor] = []
        self.replays = 0

    def __call__(self, fixed: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        """Run the function of [*fixed, *others].

        Args:
            fixed: used where they lie, and may be written to.
            others: copied into memory of the graph, unless they are the same unchanged tensors as in the last call.

        Raises:
            CaptureRefused: torch cannot trace, compile or capture the function.
        """
        if not self._copies:
            self._copies = [t.clone(memory_format=torch.contiguous_format) for t in others]
            self._given = [(t, t._version) for t in others]
        else:
            self._copy(others)
        if [t.data_ptr() for t in fixed] != [t.data_ptr() for t in self._fixed]:
            self._graph, self._outputs, self._fixed = None, [], list(fixed)
        if self._compiled is None:
            self._compiled = self._compile()
            return self._run()
        if self._fixed[0].device.type != "cuda":
            return self._run()
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()
        self.replays += 1
        return self._outputs

    def release(self) -> None:
        """Free the graph and its memory; the compiled function stays, and the next call records it again."""
        self._graph, self._outputs = None, []
        self._fixed, self._copies, self._given = [], [], []

    def _copy(self, others: Sequence[Tensor]) -> None:
        changed = [i for i, t in enumerate(others) if t is not self._given[i][0] or t._version != self._given[i][1]]
        if changed:
            torch._foreach_copy_([self._copies[i] for i in changed], [others[i] for i in changed])
            for i in changed:
                self._given[i] = others[i], others[i]._version

    def _run(self) -> list[Tensor]:
        assert self._compiled is not None
        with torch.no_grad():
            return list(self._compiled(*self._fixed, *self._copies))

    def _compile(self) -> Callable[..., Sequence[Tensor]]:
        function, inputs = self._function, [*self._fixed, *self._copies]
        assert function is not None
        self._function = None  # it may hold a model
        trace = make_fx(lambda *flat: function(list(flat)), tracing_mode="fake", _allow_non_fake_inputs=True)
        try:
            with warnings.catch_warnings():
                # what inductor advises is about speed, and a program that turns warnings into errors would be refused
                warnings.simplefilter("ignore")
                traced = trace(*inputs)
                move_constants(traced, inputs[0].device)
                with torch.no_grad():
                    return compiled(traced, inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CaptureRefused(sentence_of(error)) from error

    def _capture(self) -> None:
        global _failed
        if _failed:
            raise CaptureRefused(f"an earlier capture failed in this process: {_failed}")
        device, graph = self._fixed[0].device, torch.cuda.CUDAGraph()
        try:
            with warnings.catch_warnings(), torch.cuda.device(device):
                warnings.simplefilter("ignore")  # that of an empty graph would hide the error that ended it
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._outputs = self._run()
        except Exception as error:
            self._outputs = []
            _failed = sentence_of(error)
            _leave_capture(device)
            raise CaptureRefused(_failed) from error
        self._graph = graph


def compiled(traced: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a traced function by inductor."""
    from torch._inductor import compile as by_inductor  # importing it takes seconds

    function: Callable[..., Sequence[Tensor]] = by_inductor(traced, list(inputs))
    return function


def move_constants(traced: torch.fx.GraphModule, device: torch.device) -> None:
    """Move the tensors that a model made of plain numbers to the device: a graph cannot copy them there."""
    for node in traced.graph.nodes:
        value = getattr(traced, node.target, None) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and value.device != device:
            setattr(traced, node.target, value.to(device))


_failed = ""  # what a capture said that failed: after one, torch's generator refuses all others


def _leave_capture(device: torch.device) -> None:
    """Give the device's generator a new state: after a failed capture it would refuse to draw at all."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    default = torch.cuda.default_generators[index]
    seed = default.initial_seed()
    default.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    default.manual_seed(seed)


def sentence_of(error: BaseException) -> str:
    """Return what an error says, on one line of bearable length."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 300 else text[:297] + "..."
