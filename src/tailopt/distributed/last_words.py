"""The last words of a node that must end: which node is gone, in which round, and the command to go on.

A traceback and the words of torchrun are long. The last thing that a node prints is therefore one block:

    tailopt: node 2 is gone in round 3: no sign of life for 10 s.
    The last good checkpoint is that after round 2: runs/real/checkpoints/round-000002.
    To go on, run again: torchrun --nproc-per-node 3 train.py

torchrun sends SIGTERM to all nodes as soon as one of them is gone, before they can know which one. `on_sigterm` lets a
thread find it out first. Python's own handlers run in the main thread alone, which may be inside C++.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

resume_arguments: list[str] = []  # what a program adds to its own command line to go on

_LINE = "-" * 79


def block(sentence: str, checkpoint: str = "") -> str:
    """The last words: what happened, what is left, how to go on."""
    lines = [f"tailopt: {sentence[0].lower()}{sentence[1:]}", checkpoint, _how_to_go_on()]
    return "\n".join([_LINE, *(line for line in lines if line), _LINE])


def say(text: str) -> None:
    """Print on standard error, if that still takes anything."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _how_to_go_on() -> str:
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") or 0)
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
    if done < restarts:
        return f"torchrun starts all nodes again (restart {done + 1} of {restarts})."
    return f"To go on, run again: {shlex.join([*started_by(), *resume_arguments])}"


def started_by() -> list[str]:
    """The command that started this node: torchrun's, where it can be read, else this process's own."""
    own = list(getattr(sys, "orig_argv", None) or sys.argv)
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not parent.is_file():
        return own
    with contextlib.suppress(OSError):
        words = [word.decode(errors="replace") for word in parent.read_bytes().split(b"\0") if word]
        if any("torchrun" in word or "torch.distributed.run" in word for word in words):
            return words
    return own


def on_sigterm(words: Callable[[], str], start_thread: Callable[..., object]) -> None:
    """Print some last words when this process is told to end, and end as a process without a handler would.

    Nothing is installed where the program handles SIGTERM or wakes up by signals itself, or outside the main thread.

    Args:
        words: what to print; called in the thread.
        start_thread: starts a thread that does not keep the process alive, from its function and arguments.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    hears, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return
    _TOLD[:] = [told]
    signal.signal(signal.SIGTERM, _tell)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_as_before)
    sockets = hears, told  # both kept by the thread: a collected socket would close the descriptor
    start_thread(_listen, *sockets, words, os.getpid())


_TOLD: list[socket.socket] = []


def _tell(number: int, frame: object) -> None:
    """Wake the thread. The system has woken it already, unless somebody else wanted to be woken by signals since."""
    with contextlib.suppress(OSError):
        _TOLD[0].send(bytes([number]))


_MASKS: list[set[int | signal.Signals]] = []  # of the thread that forks, meanwhile


def _hold() -> None:
    """Hold SIGTERM back while this thread forks: the child must not take it before `_as_before` has run there."""
    _MASKS.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASKS.pop())


def _as_before() -> None:
    """Undo it in a forked child, such as a worker that loads data: there is no such thread in it.

    Without this, a child that is told to end would not end, and would wake the thread of its parent instead.
    """
    if signal.getsignal(signal.SIGTERM) is _tell:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()


def _listen(hears: socket.socket, told: socket.socket, words: Callable[[], str], pid: int) -> None:
    while data := hears.recv(64):
        # a program that has set a handler of its own since then decides for itself
        if signal.SIGTERM in data and os.getpid() == pid and signal.getsignal(signal.SIGTERM) is _tell:
            with contextlib.suppress(Exception):
                if text := words():
                    say(text)
            _end_by(signal.SIGTERM)


def _end_by(number: signal.Signals) -> None:
    """End with the status of a process that had no handler; only the main thread may change handlers in Python."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).signal(int(number), None)
        os.kill(os.getpid(), number)
    os._exit(128 + number)
