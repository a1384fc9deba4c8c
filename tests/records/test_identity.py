"""A checkpoint knows its run, and a run its settings: what was changed or belongs elsewhere is refused by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tailopt
from tailopt.records import checkpoints, history
from tailopt.records.checked_json import DamagedRecord
from tailopt.records.folder import Run, accept_config
from tailopt.records.identity import OtherRun
from tailopt.records.run_config import config_digest
from tests.records.old_runs import simulated


@pytest.fixture
def run(tmp_path: Path) -> Path:
    simulated(tmp_path / "run", rounds=3)
    return tmp_path / "run"


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def state(result: tailopt.Result) -> str:
    return checkpoints.digest(result.model.state_dict())


def test_one_changed_setting_is_refused_by_every_reader(run: Path) -> None:
    edit(run / "config.toml", "ilr = 0.5", "ilr = 0.7")
    for reader in (lambda: simulated(run, resume=True), lambda: Run.open(run)):
        with pytest.raises(DamagedRecord, match=r"config\.toml is not .*algorithm\.ilr is 0\.7, and was 0\.5.*copy"):
            reader()


def test_every_flipped_bit_of_settings_and_identity_is_found(run: Path) -> None:
    for file in (run / "config.toml", run / "run.json"):
        data = file.read_bytes()
        for index in range(0, len(data), 3):
            file.write_bytes(data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :])
            if file.name == "run.json":  # every manifest repeats it
                with pytest.warns(UserWarning, match=r"run\.json .* is taken from the checkpoints"):
                    assert Run.open(run).identity is not None
            else:
                with pytest.raises((DamagedRecord, ValueError), match=r"config\.toml"):
                    Run.open(run)
        file.write_bytes(data)
    Run.open(run)


def test_a_lost_run_json_is_written_again(run: Path, tmp_path: Path) -> None:
    before = (run / "run.json").read_bytes()
    (run / "run.json").unlink()
    with pytest.warns(UserWarning, match=r"run\.json is missing\. What it said is taken from the checkpoints"):
        result = simulated(run, resume=True)
    assert (run / "run.json").read_bytes() == before
    assert state(result) == state(simulated(tmp_path / "whole"))


def test_without_checkpoints_a_lost_run_json_is_an_error(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"rounds": 1}, {})
    (run.path / "run.json").unlink()
    with pytest.raises(DamagedRecord, match=r"run\.json is missing, and no checkpoint says.*Bring it back"):
        Run.open(run.path)


def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    simulated(tmp_path / "other", rounds=4)
    shutil.copytree(tmp_path / "other/checkpoints/round-000004", run / "checkpoints/round-000004")
    files = sorted((p, p.read_bytes()) for p in run.rglob("*") if p.is_file())
    with pytest.raises(OtherRun, match=r"round-000004 is a checkpoint of another run: .*Take it out of"):
        simulated(run, resume=True)
    assert [(p, d) for p, d in files if p.read_bytes() != d] == []
    shutil.rmtree(run / "checkpoints/round-000004")
    assert state(simulated(run, resume=True)) == state(simulated(tmp_path / "whole"))


def test_a_checkpoint_under_another_name_is_passed_over(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints/round-000002").rename(run / "checkpoints/round-000007")
    with pytest.warns(UserWarning, match="round-000007 is passed over.*it is the manifest of round-000002"):
        assert state(simulated(run, resume=True)) == state(simulated(tmp_path / "whole"))


def test_another_number_of_rounds_is_logged_and_not_rewritten(run: Path) -> None:
    before = (run / "config.toml").read_bytes()
    simulated(run, rounds=4, resume=True)
    assert (run / "config.toml").read_bytes() == before and b"rounds = 3" in before
    assert "resumed with rounds = 4, where config.toml has 3" in (run / "log.txt").read_text()


def test_lost_checkpoints_are_not_a_new_beginning(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    rows = (run / "history.jsonl").read_bytes()
    with pytest.raises(FileNotFoundError, match=r"checkpoints holds no checkpoint, and .*history\.jsonl has 3 rows"):
        simulated(run, resume=True)
    assert (run / "history.jsonl").read_bytes() == rows


def test_accepted_changes_are_chained_and_older_checkpoints_accepted_through_them(run: Path) -> None:
    assert accept_config(run) is None
    first = (run / "config.toml").read_bytes()
    edit(run / "config.toml", "ilr = 0.5", "ilr = 0.7")
    assert accept_config(run) == [["algorithm.ilr", 0.5, 0.7]]
    edit(run / "config.toml", "guard = true", "guard = false")
    assert accept_config(run) == [["run.guard", True, False]]
    found = Run.open(run)
    assert found.config["algorithm"]["ilr"] == 0.7
    rows = history.read(run / "config-changes.jsonl")
    assert [row["round"] for row in rows] == [3, 3] and rows[0]["old"] == config_digest(first)
    assert rows[0]["new"] == rows[1]["old"] and rows[1]["new"] == config_digest((run / "config.toml").read_bytes())
    assert "accepted after round 3 that in config.toml algorithm.ilr is 0.7" in (run / "log.txt").read_text()
    for path in checkpoints.list_checkpoints(run):
        found.check_checkpoint(checkpoints.load(path), path)

    data = (run / "config-changes.jsonl").read_bytes()
    for index in range(0, len(data) - 1, 7):
        (run / "config-changes.jsonl").write_bytes(data[:index] + bytes([data[index] ^ 4]) + data[index + 1 :])
        with pytest.raises((DamagedRecord, ValueError), match=r"config-changes\.jsonl|config\.toml"):
            Run.open(run)
    for damaged in (b"", data.splitlines(keepends=True)[0], data + data, data[: len(data) - 9]):
        (run / "config-changes.jsonl").write_bytes(damaged)
        with pytest.raises(DamagedRecord, match=r"config-changes\.jsonl|config\.toml"):
            Run.open(run)


def test_manifests_hold_run_settings_and_history(run: Path) -> None:
    body = json.loads((run / "checkpoints/round-000002/manifest.json").read_text())
    lines = history.complete_lines(run / "history.jsonl")
    from tailopt.records.ledger import chain_of

    own = Run.open(run).identity
    assert own is not None
    assert body["run"][:2] == [own.id, config_digest((run / "config.toml").read_bytes())]
    assert body["run"][2] == list(chain_of(run / "history.jsonl", lines[:2]))
