"""`tailopt report`: runs, sweeps and studies as one HTML file."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tailopt.cli.compare import find_runs, first_sentence, primary_metric, read_each
from tailopt.cli.overrides import Overrides
from tailopt.progress import Progress
from tailopt.records import disk
from tailopt.records.environment import environment
from tailopt.records.folder import Run
from tailopt.report.contents import Contents, MetricOf, nothing_in_common, short_names, sweeps_and_studies
from tailopt.report.page import report_page
from tailopt.report.sweep_data import read_trials

EXAMPLE = """\
  tailopt run --task syntoken --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 --rounds 20 --out runs/biclip
  tailopt run --task syntoken --algorithm avg-sgd --ilr 0.01 --rounds 20 --out runs/sgd
  tailopt report runs/biclip runs/sgd --out runs/report.html"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "report",
        help="runs, sweeps and studies as one HTML file",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt report FOLDER [FOLDER ...] [--out FILE.html] [--title TEXT]",
        description="Write one HTML file that needs no network: curves with their spread over seeds, settings, what\n"
        "was clipped, who took part, where the time went. A folder may hold a run, a sweep, a study, or such folders.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folders of runs, sweeps or studies, or of these")
    parser.add_argument("--out", metavar="FILE.html", default="report.html", help="by default report.html")
    parser.add_argument("--title", metavar="TEXT", help="of the page")
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Read the folders and write the file."""
    out = Path(arguments.out)
    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise ValueError(f"Invalid out: {arguments.out!r}; need the name of a file that ends in .html.")
    folders = list(map(Path, arguments.folders))
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise FileNotFoundError(f"There is no folder {missing[0]}. Pass folders of runs, sweeps or studies.")
    contents = read(folders)
    subject = folders[0].resolve().name if len(folders) == 1 else f"{len(folders)} folders"
    title = arguments.title or f"Report of {subject}"
    version = f"tailopt {environment()['tailopt']}"
    made = f"made by {version} on {datetime.now().astimezone().strftime('%Y-%m-%d %H:%M')}"
    with Progress(True, seconds_between_lines=2.0) as bar:
        page = report_page(contents, title, with_progress(contents, bar), made, version)
    out.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(out, page.encode())
    for notice in contents.notices:
        print(notice, file=sys.stderr)
    print(f"wrote {out}: {describe(contents)}, {len(page.encode()) / 1e6:.2g} MB; open it in a browser")
    return 0


def with_progress(contents: Contents, bar: Progress) -> MetricOf:
    """The metric of a run, which the page asks for when it comes to that run."""
    began, places = time.monotonic(), {run.path: k for k, run in enumerate(contents.runs.values())}

    def metric_of(run: Run) -> tuple[str, bool]:
        if time.monotonic() - began > 2.0:  # a report of a few short runs says nothing
            bar.update(places[run.path], len(places), f"reading {run.path.name}")
        return primary_metric(run)

    return metric_of


def read(folders: list[Path]) -> Contents:
    """Read what the folders hold; what cannot be read is a notice, unless nothing else is left."""
    sweeps, studies = sweeps_and_studies(folders)
    paths = list(dict.fromkeys(path for folder in folders for path in find_runs(folder) if path.is_dir()))
    paths = [path for path in paths if path not in (*sweeps, *studies)]
    runs, unreadable = read_each(paths, Run.open)
    _, damaged = read_each(runs, Run.history)
    whole = [run for run in runs if run not in damaged]
    _, broken = read_each(sweeps, read_trials)
    errors = {**unreadable, **{run.path: error for run, error in damaged.items()}, **broken}
    sweeps = [path for path in sweeps if path not in broken]
    if not (whole or sweeps or studies):
        if errors:
            raise next(iter(errors.values()))
        raise FileNotFoundError(
            f"There is no run, sweep or study in {', '.join(map(str, folders))}. Make one: tailopt run --out FOLDER."
        )
    notices = [f"{path} is left out: {first_sentence(error)}." for path, error in errors.items()]
    return Contents(
        runs=dict(zip(short_names([run.path for run in whole]), whole, strict=True)),
        sweeps=dict(zip(short_names(sweeps), sweeps, strict=True)),
        studies=dict(zip(short_names(studies), studies, strict=True)),
        notices=[*notices, *filter(None, [nothing_in_common(whole)])],
    )


def describe(contents: Contents) -> str:
    """What a report is about, in words.

    Examples:
        >>> describe(Contents(studies={"glue": Path("glue")}))
        '1 study'
    """
    parts = (contents.runs, "run", "runs"), (contents.sweeps, "sweep", "sweeps"), (contents.studies, "study", "studies")
    return ", ".join(f"{len(found)} {one if len(found) == 1 else many}" for found, one, many in parts if found)
