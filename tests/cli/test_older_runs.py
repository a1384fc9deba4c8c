"""Run folders whose config.toml has the flat layout of older versions are read, compared and continued as they are."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tailopt.cli.main import main
from tailopt.records.folder import Run

# written by commit edf8be5: two of the four rounds of COMMAND
FLAT = Path(__file__).parent / "fixtures" / "flat"
COMMAND = shlex.split(
    "run --task syntoken --preset small --nodes 2 --algorithm avg-biclip --ilr 0.5 --i_u 0.1 --i_d 0.01 "
    "--schedules.ilr.power -0.25 --keep 1 --quiet"
)


@pytest.fixture
def flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FLAT, "flat")
    assert Path("flat/config.toml").read_text().startswith('algorithm = "avg-biclip"\n')
    return Path("flat")


def errors(folder: str | Path) -> list[float]:
    return [row["metrics"]["error"] for row in Run.open(folder).history()]


def test_it_is_read_as_a_new_folder_of_the_same_run(flat: Path) -> None:
    assert main([*COMMAND, "--rounds", "2", "--out", "new"]) == 0
    assert Run.open(flat).config == Run.open("new").config
    assert Path("new/config.toml").read_text().startswith("[task]\n")
    assert errors(flat) == pytest.approx(errors("new"))  # another processor may round otherwise


def test_it_goes_on_without_a_change_of_its_file(flat: Path) -> None:
    before = (flat / "config.toml").read_bytes()
    assert main(["resume", "flat", "--rounds", "4", "--quiet"]) == 0
    assert main([*COMMAND, "--rounds", "4", "--out", "new"]) == 0
    assert (flat / "config.toml").read_bytes() == before
    assert errors(flat) == pytest.approx(errors("new"))  # another processor may round otherwise


def test_its_file_starts_another_run(flat: Path) -> None:
    assert main(["run", "flat/config.toml", "--rounds", "3", "--quiet", "--out", "again"]) == 0
    assert main([*COMMAND, "--rounds", "3", "--out", "new"]) == 0
    assert Path("again/config.toml").read_bytes() == Path("new/config.toml").read_bytes()


def test_a_change_of_it_is_named_as_it_stands_there(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (flat / "config.toml").read_text()
    (flat / "config.toml").write_text(text.replace("ilr = 0.5", "ilr = 0.25", 1))
    assert main(["resume", "flat", "--rounds", "3", "--quiet"]) == 2
    assert "settings.ilr is 0.25, and was 0.5" in capsys.readouterr().err
    assert main(["resume", "flat", "--rounds", "3", "--quiet", "--accept-config"]) == 0
    assert Run.open(flat).config["algorithm"]["ilr"] == 0.25


def test_it_is_compared_with_new_ones(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--rounds", "2", "--i_d", "0.05", "--out", "new"]) == 0
    capsys.readouterr()
    assert main(["compare", "flat", "new"]) == 0
    differing = capsys.readouterr().out.split("settings that differ")[1]
    assert "i_d" in differing and "0.05" in differing and "ilr" not in differing
