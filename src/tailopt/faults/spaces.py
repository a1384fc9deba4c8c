"""Namespaces of the Linux kernel, kept open by a process that does nothing: no root, and nothing left behind.

A namespace lives as long as a process in it. Ours is a `cat` that waits for the end of its input, which comes when the
program that started it closes the pipe, or dies. Who is not root gets a user namespace around it, and is root in there.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence


class Unavailable(OSError):
    """This system does not let the user make such a namespace; the message has what it said."""


class Space:
    """A process in namespaces of its own, ready when the commands it begins with are done.

    Args:
        kind: "net" or "mount".
        begin: shell commands that run in there first.
        around: a space whose user namespace it shares.
    """

    def __init__(self, kind: str, begin: str = "true", around: Space | None = None) -> None:
        if sys.platform != "linux":
            raise Unavailable(f"There are no namespaces on {sys.platform}: they are Linux's.")
        self.kind = kind
        self.mapped: bool = around.mapped if around is not None else not _allowed(kind)
        enter = around.command(network=False) if around is not None and around.mapped else []
        unshare = ["unshare", *(["--map-root-user"] if self.mapped and around is None else []), f"--{kind}"]
        shell = ["sh", "-c", f"{begin} && echo ready && exec cat"]
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen([*enter, *unshare, *shell], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        except FileNotFoundError as error:
            raise Unavailable(f"{error.filename} is not installed: it is part of util-linux.") from error
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            said = self.process.communicate()[1].strip()
            raise Unavailable(f"A {kind} namespace is not permitted here: {said or 'no reason given'}.")

    @property
    def pid(self) -> int:
        """Of the process that keeps it open."""
        return self.process.pid

    def command(self, command: Sequence[str] = (), network: bool = True) -> list[str]:
        """A command line that runs in there."""
        user = ["--user", "--preserve-credentials"] if self.mapped else []
        return ["nsenter", "--target", str(self.pid), *user, *(["--net"] if network else []), "--", *command]

    def enter(self) -> None:
        """Move this process in there; its other threads stay where they are."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        for kind in (["user"] if self.mapped else []) + ["net"]:
            with open(f"/proc/{self.pid}/ns/{kind}") as file:
                if setns(file.fileno(), 0):
                    raise Unavailable(f"The {kind} namespace cannot be entered: {os.strerror(ctypes.get_errno())}.")

    def close(self) -> None:
        """Let go of it; it goes when the last process in it has ended."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate()


def run(command: Sequence[str]) -> None:
    """Run a command; what it says where it fails is the error."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Unavailable(f"{error.filename} is not installed: it is part of util-linux or iproute2.") from error
    if found.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {(found.stderr or found.stdout).strip()}.")


def _allowed(kind: str) -> bool:
    """Whether this process may make one without being root in a user namespace."""
    if os.geteuid():
        return False
    try:
        return subprocess.run(["unshare", f"--{kind}", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
