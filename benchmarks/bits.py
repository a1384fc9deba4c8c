"""Did a change leave every bit as it was? Digests of weights, histories and checkpoints, to compare two versions.

    python benchmarks/bits.py --write before.json       # in the old version
    python benchmarks/bits.py --compare before.json     # in the new one; exit status 1 where a digest differs

All 18 algorithms run as a simulation, as a simulation that stops in the middle of a round and resumes, on three
processes, on three processes that stop in the middle of a round and resume, and on two nodes of two ranks with FSDP2
inside. Further cases cover the options of a round, other types and sizes of parameters, and inner optimizers that a
user brings. Models have a few hundred parameters: this compares bits and times nothing.

A case has four digests: weights (also the iterate average), history (the rows of every process and history.jsonl),
checkpoints (one digest per checkpoint: the bytes of its files and the manifest) and config.toml. Left out is what is
random in every run: the run id, and the seals and chains of digests that include it. Only public names are used, so
this file also runs with older versions: `tailopt` is the one that Python imports, and its path is printed.

Digests depend on the processor, on torch and on the number of threads (1 here). `--only PATTERN` selects cases,
`--list` prints their names, `--keep FOLDER` keeps the run folders, so that two of them can be compared file by file.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bits_cases import SECTIONS, Digests, digest_of

import tailopt

SECONDS = 900.0  # for the cases of one section


def work(rank: int, processes: int, port: int, cases: Mapping[str, Callable[[Path], Digests]], folder: Path) -> None:
    """Run every case of a section in this process; what it finds is written to a file of the folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if processes > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    answers: dict[str, Digests] = {}
    for name, case in cases.items():
        run = folder / name
        if rank == 0:
            run.parent.mkdir(parents=True, exist_ok=True)
        try:
            answers[name] = case(run)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".replace(str(folder), "")
            answers[name] = {"error": message}
            traceback.print_exc()
        if processes > 1:
            dist.barrier()
        if rank == 0:
            show(f"{name}")
    (folder / f"{processes}-{rank}.json").write_text(json.dumps(answers))


def forked(function: Callable[[], None]) -> int:
    """Call a function in a fork of this process, which has imported torch already; returns its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def wait(pids: list[int]) -> None:
    """Wait for processes; kill the others when one fails or the time is over."""
    until, running = time.monotonic() + SECONDS, set(pids)
    try:
        while running:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.remove(pid)
                    if status:
                        raise SystemExit(f"A process ended with status {os.waitstatus_to_exitcode(status)}; see above.")
            if time.monotonic() > until:
                raise SystemExit(f"The cases of a section took longer than {SECONDS:.0f} s.")
            time.sleep(0.05)
    finally:
        for pid in running:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def merged(answers: list[Digests]) -> Digests:
    """One entry per case: what all processes found; run folders are read by process 0."""
    if any("error" in answer for answer in answers):
        return {"error": [answer.get("error") for answer in answers]}
    if len(answers) == 1:
        return answers[0]
    return {**answers[0], **{key: digest_of([answer[key] for answer in answers]) for key in ("weights", "history")}}


def measured(only: str, folder: Path) -> dict[str, Digests]:
    """The digests of all cases whose name matches a pattern."""
    every: dict[str, Digests] = {}
    for processes, section in SECTIONS:
        cases = {name: case for name, case in section().items() if fnmatch.fnmatch(name, only)}
        if not cases:
            continue
        port = free_port()
        ranks = range(processes)
        wait([forked(partial(work, rank, processes, port, cases, folder)) for rank in ranks])
        found = [json.loads((folder / f"{processes}-{rank}.json").read_text()) for rank in ranks]
        every |= {name: merged([answers[name] for answers in found]) for name in cases}
    return every


def differences(before: Mapping[str, Digests], after: Mapping[str, Digests]) -> list[str]:
    """What differs, a line per case and digest; cases that only `before` has are left out."""
    lines = []
    for name, digests in after.items():
        if name not in before:
            lines.append(f"{name}: not in the recorded file")
            continue
        old = before[name]
        for key in sorted({*digests, *old}):
            if digests.get(key) == old.get(key):
                continue
            if key == "checkpoints" and key in digests and key in old:
                rounds = sorted({*digests[key], *old[key]})
                which = [r for r in rounds if digests[key].get(r) != old[key].get(r)]
                lines.append(f"{name}: checkpoints differ: {', '.join(which)}")
            elif key == "error":
                lines.append(f"{name}: error was {old.get(key)}, is {digests.get(key)}")
            else:
                lines.append(f"{name}: {key} differs")
    return lines


def environment() -> dict[str, Any]:
    """What the digests depend on in addition to the code."""
    return {"torch": torch.__version__, "instruction_set": torch.backends.cpu.get_cpu_capability()}


def show(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="run the cases and write their digests")
    action.add_argument("--compare", type=Path, metavar="FILE", help="run the cases and compare with written digests")
    action.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only cases that match, such as 'nodes/*'")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders there")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(name for _, section in SECTIONS for name in section() if fnmatch.fnmatch(name, arguments.only)))
        return
    if arguments.keep and arguments.keep.exists() and any(arguments.keep.iterdir()):
        parser.error(f"{arguments.keep} is not empty; name a new folder, since a run does not write into an old one")
    recorded = json.loads(arguments.compare.read_text()) if arguments.compare else None
    if recorded and recorded["environment"] != environment():
        parser.exit(2, f"{arguments.compare} was written with {recorded['environment']}; here it is {environment()}.\n")
    print(f"tailopt: {Path(tailopt.__file__).parent}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        cases = measured(arguments.only, folder)
    show("")
    failed = [f"{name}: {digests['error']}" for name, digests in cases.items() if "error" in digests]
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s; {len(failed)} raised an error.")
    if recorded is None:
        print("\n".join(failed), end="\n" if failed else "")
        text = json.dumps({"environment": environment(), "cases": cases}, indent=1, sort_keys=True)
        arguments.write.write_text(text + "\n")
        print(f"Wrote {arguments.write}.")
        raise SystemExit(1 if failed else 0)
    lines = differences(recorded["cases"], cases)
    print("\n".join(lines) if lines else f"No digest differs from {arguments.compare}.")
    if lines:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
