"""Submit this app, follow its log, and exit with 1 if the run failed: `flwr run` itself exits with 0.

    python run.py [SUPERLINK] [options of `flwr run`]

Nothing is installed at run time (the app uses this environment) and nothing is reported to Flower's telemetry.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

OFFLINE = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
APP = Path(__file__).parent
SECONDS = 600  # that a run may take to end after its log has ended


def flwr(*arguments: str, **options) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(["flwr", *arguments], env={**os.environ, **OFFLINE, "PATH": path}, text=True, **options)


def main(arguments: list[str]) -> int:
    superlink = arguments[:1] if arguments and not arguments[0].startswith("-") else []
    options = arguments[len(superlink) :]
    submitted = flwr("run", str(APP), *superlink, *options, "--format", "json", stdout=subprocess.PIPE)
    try:
        run = str(json.loads(submitted.stdout[submitted.stdout.index("{") :])["run-id"])
    except (ValueError, KeyError):
        print(f"The run was not accepted:\n{submitted.stdout}", file=sys.stderr)
        return 1
    flwr("log", run, *superlink)
    deadline = time.monotonic() + SECONDS
    while True:
        listed = flwr("ls", *superlink, "--run-id", run, "--format", "json", stdout=subprocess.PIPE)
        status = json.loads(listed.stdout[listed.stdout.index("{") :])["runs"][0]["status"]
        if status.startswith("finished") or time.monotonic() > deadline:
            break
        time.sleep(1)
    print(f"run {run}: {status}", file=sys.stderr)
    return 0 if status == "finished:completed" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
