"""A task by path on the command line, and what may make its code run."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailopt.cli.main import main
from tailopt.records.folder import Run
from tailopt.tasks import own

EXAMPLE = (Path(__file__).parents[2] / "examples" / "my_task.py").read_text(encoding="utf-8")
LOG = "\nwith open('log', 'a') as log:\n    print('ran', file=log)\n"
RUN = shlex.split("run --task line.py:Line --samples 80 --algorithm avg-sgd --ilr 0.1 --rounds 2 --quiet --out runs/a")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(own, "_loaded", {})
    Path("line.py").write_text(EXAMPLE + LOG)
    yield
    for name in ("line", "moved"):
        sys.modules.pop(name, None)


def forget() -> None:
    """As in the next process."""
    sys.modules.pop("line", None)
    own._loaded.clear()
    Path("log").unlink(missing_ok=True)


def test_run_resume_compare_and_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    assert capsys.readouterr().err == ""  # the user named the file
    recorded = Run.open("runs/a").config["task"]
    assert recorded["name"] == f"{tmp_path}/line.py:Line" and recorded["samples"] == 80
    assert recorded["code"] == {
        "sha256": own.file_digest("line.py:Line"),
        "metric": "error",
        "lower_is_better": True,
    }
    forget()
    assert main(["compare", "runs"]) == main(["list", "runs"]) == 0
    assert "error, lower is better" in capsys.readouterr().out
    assert not Path("log").exists(), "looking at runs runs nothing"
    assert main(["resume", "runs/a", "--rounds", "4", "--quiet"]) == 0
    assert f"running the code of the task {tmp_path}/line.py:Line, unchanged" in capsys.readouterr().err
    assert main([*RUN[:-1], "runs/whole", "--rounds", "4"]) == 0
    assert Path("runs/a/history.jsonl").read_bytes() == Path("runs/whole/history.jsonl").read_bytes()
    assert main(["run", "runs/a/config.toml", "--rounds", "1", "--quiet", "--out", "runs/b"]) == 0


def test_a_changed_file_is_run_only_when_it_is_named_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    Path("line.py").write_text(EXAMPLE + LOG.replace("ran", "changed"))
    forget()
    again = [
        ["resume", "runs/a", "--rounds", "3"],
        ["run", "runs/a/config.toml", "--rounds", "1"],
        ["verify", "runs/a"],
    ]
    for words in again:
        assert main(words) == 2
        assert "If the change is meant, name it again: --task line.py:Line." in capsys.readouterr().err
    assert not Path("log").exists() and len(Run.open("runs/a").history()) == 2
    assert main([*again[0], "--quiet", "--task", "line.py:Line"]) == 0
    assert "accepted: task.code.sha256 is" in capsys.readouterr().err
    assert Path("log").read_text() == "changed\n" and Path("runs/a/config-changes.jsonl").exists()
    assert main(["resume", "runs/a", "--rounds", "5", "--quiet"]) == 0, "it is known from now on"


def test_a_diagnosis_follows_the_same_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--task", "line.py:Line", "--samples", "80", "--batches", "40", "--quiet"]) == 0
    assert "40 batches of" in capsys.readouterr().out
    assert main(RUN) == 0
    forget()
    assert main(["diagnose", "runs/a", "--batches", "40", "--quiet"]) == 0
    assert "line.py:Line, unchanged since this run was started" in capsys.readouterr().err
    Path("line.py").write_text(EXAMPLE + LOG.replace("ran", "changed"))
    forget()
    assert main(["diagnose", "runs/a"]) == 2
    assert "If the change is meant, name it again: --task line.py:Line." in capsys.readouterr().err
    assert not Path("log").exists()


def test_a_moved_file_is_named_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    Path("line.py").rename("moved.py")
    assert main(["resume", "runs/a", "--rounds", "3"]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["resume", "runs/a", "--rounds", "3", "--quiet", "--task", "moved.py:Line"]) == 0
    assert Run.open("runs/a").config["task"]["name"].endswith("/moved.py:Line")


@pytest.mark.parametrize("name", ["line.py:Line", "/somewhere/line.py:Line", "line:Line"])
def test_a_folder_from_somebody_else_runs_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a digest, or with a path that depends on the folder in which the user happens to be."""
    Path("theirs").mkdir()
    Path("theirs/config.toml").write_text(
        f'algorithm = "avg-sgd"\nrounds = 1\n[settings]\nilr = 0.1\n[task]\nname = "{name}"\nsamples = 8\n'
    )
    for words in (["run", "theirs/config.toml"], ["resume", "theirs"]):
        assert main(words) == 2
        assert "If you trust it, name it: --task line" in capsys.readouterr().err
    assert not Path("log").exists()
    sha256 = own.file_digest("line.py:Line")
    Path("theirs/config.toml").write_text(
        'algorithm = "avg-sgd"\nrounds = 1\n[settings]\nilr = 0.1\n[task]\nname = "line.py:Line"\n'
        f'[task.code]\nsha256 = "{sha256}"\n'
    )
    assert main(["resume", "theirs"]) == 2
    assert "without its whole path, so it is not run" in capsys.readouterr().err
    assert not Path("log").exists()


@pytest.mark.parametrize("command", ["run", "resume", "accept", "verify"])
def test_nor_does_one_whose_config_was_written_anew(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the layout of a user's own file, and with a file that came with it."""
    assert main(RUN) == 0
    forget()
    Path("line.py").rename("runs/a/evil.py")
    written = '[task]\nname = "evil.py:Line"\n[algorithm]\nname = "avg-sgd"\nilr = 0.1\n'
    Path("runs/a/config.toml").write_text(written)
    Path("runs/a/run.json").unlink()  # a folder of an older version has none, nor a digest of its config.toml
    Path("runs/a/history.seal.json").unlink()
    for checkpoint in Path("runs/a/checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    words = {"run": ["run", "runs/a/config.toml"], "accept": ["resume", "runs/a", "--accept-config"]}
    assert main(words.get(command, [command, "runs/a"])) == 2
    assert "so it is not run. If you trust it, name it: --task evil.py:Line" in capsys.readouterr().err
    assert not Path("log").exists()


def test_a_path_in_a_file_is_relative_to_that_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("deep").mkdir()
    Path("line.py").rename("deep/line.py")
    Path("deep/a.toml").write_text(
        '[task]\nname = "line.py:Line"\nnoise = 0.5\n[algorithm]\nname = "avg-sgd"\nilr = 0.1\n[run]\nrounds = 1\n'
    )
    assert main(["run", "deep/a.toml", "--quiet", "--out", "b"]) == 0
    Path("deep/a.toml").write_text('[task]\nname = "line.py:Line"\nnois = 0.0\n')
    assert main(["run", "deep/a.toml"]) == 2
    assert "Unknown setting: task" in (said := capsys.readouterr().err) and "did you mean 'noise'" in said


def test_settings_of_the_task_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN[:-1], "b", "--nois", "1"]) == 2
    assert "Unknown option: --nois; did you mean 'noise'?" in capsys.readouterr().err
    assert main([*RUN[:-1], "b", "--samples", "few"]) == 2
    assert "Invalid task.samples: got 'few'; need a whole number." in capsys.readouterr().err
    assert (
        main(["run", "--task", "line.py:Line", "--algorithm", "avg-sgd", "--ilr", "0.1", "--rounds", "1", "--quiet"])
        == 0
    )
    assert Path("runs/Line-avg-sgd").is_dir()


def test_a_sweep_in_other_processes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--algorithm avg-sgd --space.ilr 0.05,0.1 --rounds 2 --quiet --seeds 1 --report-seeds 1 --run s"
    words += " --executor processes --workers 1"
    assert main(["sweep", "--task", "line.py:Line", *shlex.split(words)]) == 0
    assert "best: ilr=" in capsys.readouterr().out
    Path("line.py").write_text(EXAMPLE.replace("3 * x + 1", "3 * x + 2"))
    assert main(["sweep", "--task", "line.py:Line", *shlex.split(words), "--resume"]) == 2
    assert "sha256" in capsys.readouterr().err


def test_a_sweep_reads_files_as_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    Path("below").mkdir()
    Path("line.py").rename("below/line.py")
    text = '[task]\nname = "line.py:Line"\n[algorithm]\nname = "avg-sgd"\n'
    Path("below/a.toml").write_text(text + "[space]\nilr = [0.05, 0.1]\n[run]\nrounds = 2\n")
    words = ["--quiet", "--seeds", "1", "--report-seeds", "1"]
    assert main(["sweep", "below/a.toml", *words]) == 0, "a path in a file is relative to that file"
    assert "best: ilr=" in capsys.readouterr().out
    forget()
    Path("below/config.toml").write_text(text)  # the name of what a run folder has, which may be somebody else's
    assert main(["sweep", "below/config.toml", "--space.ilr", "0.05,0.1", *words]) == 2
    assert "so it is not run. If you trust it, name it: --task line.py:Line." in capsys.readouterr().err
    assert not Path("log").exists()


@pytest.mark.parametrize("command", ["run", "sweep", "resume"])
def test_a_study_and_others_say_what_they_lack(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "resume":
        assert (
            main(shlex.split("run --task syntoken --preset small --algorithm avg-sgd --ilr 0.1 --rounds 1 --out r"))
            == 0
        )
        assert main(["resume", "r", "--task", "line.py:Line"]) == 2
        assert "r is a run of 'syntoken'; --task serves only" in capsys.readouterr().err
        return
    assert main([command, "--task", "line.py", "--algorithm", "avg-sgd"]) == 2
    assert "names no class. Name it too: --task line.py:Line" in capsys.readouterr().err


def test_real_nodes(tmp_path: Path) -> None:
    """Two processes under torchrun, and the replay of their run."""
    words = "--task line.py:Line --algorithm avg-sgd --ilr 0.1 --rounds 2 --out real --quiet"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tailopt", "train", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert main(["verify", "real"]) == 0
