"""`tailopt study`: the table of studies, and the options of each."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from tailopt.cli import study
from tailopt.cli.main import main
from tailopt.studies.study import StudyOptions

FIELDS = {field.name for field in dataclasses.fields(StudyOptions)}


@pytest.mark.parametrize("name", study.STUDIES)
def test_a_study_has_a_summary_and_takes_options_that_exist(name: str) -> None:
    module = study.STUDIES[name]
    assert module.SUMMARY and set(module.OPTIONS) <= set(study.OPTIONS)
    assert len(set(module.OPTIONS)) == len(module.OPTIONS)


def test_every_option_of_a_study_is_one_of_the_command_line() -> None:
    assert {*study.OPTIONS, "quick", "progress", "command"} == FIELDS
    assert set(study.OPTIONS) == {option for module in study.STUDIES.values() for option in module.OPTIONS}


def test_the_help_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {module.SUMMARY}" in shown for name, module in study.STUDIES.items())


class Fake:
    """A study that writes what it was asked."""

    SUMMARY = "for this test"
    OPTIONS = ("task", "seeds")

    def run(self, out: Path, options: StudyOptions) -> Path:
        """Write the options as the table."""
        out.mkdir()
        (out / "table.md").write_text(str(options), encoding="utf-8")
        return out


def test_options_reach_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "STUDIES", {"failures": Fake()})
    out = tmp_path / "out"
    assert main(["study", "failures", "--out", str(out), "--quick", "--quiet", "--task", "MRPC", "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    command = "tailopt study failures --task MRPC --seeds 2 --quick"
    assert str(StudyOptions(quick=True, progress=False, task="MRPC", seeds=2, command=command)) in shown
    assert f"wrote {out}: table.md" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "2"], "Unknown option: --budget; the study failures has --task, --seeds."),
        (["--seeds", "0"], "Invalid seeds: got 0; need a whole number, 1 or more."),
        (["--seeds", "two"], "Invalid seeds: got 'two'; need a whole number, 1 or more."),
    ],
)
def test_what_a_study_cannot_take_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "STUDIES", {"failures": Fake()})
    assert main(["study", "failures", "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_study_without_options_says_that_it_has_none() -> None:
    arguments = argparse.Namespace(name="rates", quick=False, quiet=False, **dict.fromkeys(study.OPTIONS))
    arguments.task = "MRPC"
    with pytest.raises(ValueError, match="Unknown option: --task; the study rates has no options of its own"):
        study.options_of(study.STUDIES["rates"], arguments)


def test_a_report_has_the_command_without_folders_of_this_machine(tmp_path: Path) -> None:
    arguments = argparse.Namespace(name="glue", quick=True, quiet=True, **dict.fromkeys(study.OPTIONS))
    arguments.task, arguments.data, arguments.seeds = "MRPC", str(tmp_path), "2"
    options = study.options_of(study.STUDIES["glue"], arguments)
    assert options.command == f"tailopt study glue --task MRPC --data {tmp_path.name} --seeds 2 --quick"


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Fake):
        def run(self, out: Path, options: StudyOptions) -> Path:
            raise KeyboardInterrupt

    monkeypatch.setattr(study, "STUDIES", {"failures": Stopped()})
    words = ["study", "failures", "--out", str(tmp_path / "out")]
    assert main(words) == 130
    assert capsys.readouterr().err == "Stopped; nothing was written. The same command goes on from there.\n"
    (tmp_path / "out").mkdir()
    assert main(words) == 130
    assert (
        capsys.readouterr().err
        == f"Stopped; {tmp_path}/out has what was finished. The same command goes on from there.\n"
    )
