"""Linux namespaces, kept open by an idle process: no root is needed, and nothing is left behind.

A namespace lives as long as a process in it. Ours is a `cat` that waits for the end of its input; that comes when the
program that started it closes the pipe, or dies. A user who is not root gets a user namespace around it, and is root in
there.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence


class Unavailable(OSError):
    """This system does not let the user create such a namespace; the message says why."""


class Namespace:
    """A process in a namespace of its own; ready once its setup commands have run.

    Args:
        kind: "net" or "mount".
        setup: shell commands that run in it first.
        share_user_ns_with: another namespace whose user namespace it shares.
    """

    def __init__(self, kind: str, setup: str = "true", share_user_ns_with: Namespace | None = None) -> None:
        if sys.platform != "linux":
            raise Unavailable(f"There are no namespaces on {sys.platform}: they are Linux's.")
        outer = share_user_ns_with
        self.kind = kind
        # whether there is a user namespace around it, in which this user is mapped to root
        self.maps_root: bool = outer.maps_root if outer is not None else not _allowed(kind)
        enter = outer.command(network=False) if outer is not None and outer.maps_root else []
        unshare = ["unshare", *(["--map-root-user"] if self.maps_root and outer is None else []), f"--{kind}"]
        shell = ["sh", "-c", f"{setup} && echo ready && exec cat"]
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen([*enter, *unshare, *shell], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        except FileNotFoundError as error:
            raise Unavailable(f"{error.filename} is not installed: it is part of util-linux.") from error
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            reason = self.process.communicate()[1].strip()
            raise Unavailable(f"A {kind} namespace is not permitted here: {reason or 'no reason given'}.")

    @property
    def pid(self) -> int:
        """The process that keeps the namespace open."""
        return self.process.pid

    def command(self, command: Sequence[str] = (), network: bool = True) -> list[str]:
        """Return a command line that runs a command in the namespace."""
        user = ["--user", "--preserve-credentials"] if self.maps_root else []
        return ["nsenter", "--target", str(self.pid), *user, *(["--net"] if network else []), "--", *command]

    def enter(self) -> None:
        """Move the calling thread of this process into the namespace; other threads stay where they are."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        for kind in (["user"] if self.maps_root else []) + ["net"]:
            with open(f"/proc/{self.pid}/ns/{kind}") as file:
                if setns(file.fileno(), 0):
                    raise Unavailable(f"The {kind} namespace cannot be entered: {os.strerror(ctypes.get_errno())}.")

    def close(self) -> None:
        """End the idle process; the namespace disappears when the last process in it has ended."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate()


def run(command: Sequence[str]) -> None:
    """Run a command; Unavailable, with its output, if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Unavailable(f"{error.filename} is not installed: it is part of util-linux or iproute2.") from error
    if result.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {(result.stderr or result.stdout).strip()}.")


def _allowed(kind: str) -> bool:
    """Whether this process may create a namespace without a user namespace around it."""
    if os.geteuid():
        return False
    try:
        return subprocess.run(["unshare", f"--{kind}", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
