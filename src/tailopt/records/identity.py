"""Which run a folder holds, and with which settings: run.json, next to config.toml.

    run.json                written once, with a digest: the run's id, config.toml as it was written, and its sha256
    config-changes.jsonl    one row per accepted change of config.toml

Every manifest repeats the id and the digest of config.toml. So a checkpoint of another run, or with other settings, is
refused, and a damaged run.json can be recovered from the manifests. A row of config-changes.jsonl holds the round after
which the change was accepted, the old digest, the new one, and the settings that differ. Its "sha256" chains it to the
rows before it:

    h_0 = sha256(run id),    h_t = sha256(h_{t-1} + row t without "sha256")

A folder by a version without run.json gets one when it is first resumed. It lists the digests of the manifests that
existed then, which have no id, and the chain of the rows that existed.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from tailopt.records import checkpoints, disk, history
from tailopt.records.checked_json import DamagedRecord, read_verified, stored_digest, with_digest
from tailopt.records.ledger import Chain, Provenance
from tailopt.records.run_config import (
    CONFIG,
    by_dotted_name,
    config_digest,
    config_text,
    describe_difference,
    difference,
    parse_config,
)

RUN, CHANGES, SEAL = "run.json", "config-changes.jsonl", "history.seal.json"
FORMAT = 1


class OtherRun(ValueError):
    """A checkpoint belongs to another run than the folder it is in."""


@dataclass(frozen=True)
class Identity:
    """The content of run.json.

    Args:
        id: of the run, random.
        text: config.toml as it was written; "" if that was lost.
        config_digest: the sha256 of config.toml as it was written.
        adopted: the digests of the manifests that existed when an older version's folder got its id.
        history_chain_when_id_was_given: the chain of the rows that existed then; None where the run began with an id.
    """

    id: str
    text: str
    config_digest: str
    adopted: tuple[str, ...] = ()
    history_chain_when_id_was_given: Chain | None = None


class Change(NamedTuple):
    """An accepted change of config.toml: the round, both digests, and [setting, before, after] for each difference."""

    round: int
    old: str
    new: str
    difference: list[list[Any]]


def new_id() -> str:
    """Return an id for a new run."""
    return uuid4().hex


def new_identity(
    text: str, id: str, adopted: tuple[str, ...] = (), history_chain_when_id_was_given: Chain | None = None
) -> Identity:
    """Return the identity of a run whose config.toml has this text."""
    return Identity(id, text, config_digest(text.encode()), adopted, history_chain_when_id_was_given)


# run.json


def write_identity(folder: Path, identity: Identity) -> None:
    """Write run.json atomically."""
    chain = identity.history_chain_when_id_was_given
    body = {
        "format": FORMAT,
        "id": identity.id,
        "config": identity.config_digest,
        "text": identity.text,
        "adopted": list(identity.adopted),
        "since": None if chain is None else list(chain),
    }
    disk.replace(folder / RUN, with_digest(body))


def find_identity(folder: Path, config: bytes) -> Identity | None:
    """Return which run a folder holds: by run.json, or if that is damaged by the manifests, with a warning.

    None in a folder by a version without ids.

    config: the content of config.toml.
    """
    problem = "is missing"
    try:
        if (identity := _read(folder)) is not None:
            return identity
    except ValueError as error:
        problem = str(error)
    identity = _recovered(folder, config)
    if identity is not None:
        warnings.warn(
            f"{folder / RUN} {problem}. What it said is taken from the checkpoints.", UserWarning, stacklevel=4
        )
        return identity
    # A seal is only written by versions that also write run.json: without one, the folder is an older version's.
    if problem == "is missing" and not (folder / SEAL).exists():
        return None
    raise DamagedRecord(
        f"{folder / RUN} {problem}, and no checkpoint says what was in it. Bring it back from a copy, or begin again "
        "in another folder."
    )


def repair_identity(folder: Path, identity: Identity) -> None:
    """Write run.json again if it cannot be read."""
    try:
        if _read(folder) is not None:
            return
    except ValueError:
        pass
    write_identity(folder, identity)


def _read(folder: Path) -> Identity | None:
    """Return the content of run.json; None if there is none. ValueError: what is wrong with it, as a predicate."""
    try:
        body = read_verified(folder / RUN)
        if type(body["format"]) is int and body["format"] > FORMAT:
            raise DamagedRecord(
                f"{folder / RUN} has format {body['format']}, this tailopt reads formats up to {FORMAT}. Upgrade "
                "tailopt-torch."
            )
        texts = [body["id"], body["text"], body["config"], *body["adopted"]]
        if body["format"] != FORMAT or any(type(text) is not str for text in texts):
            raise ValueError(f"does not fit format {FORMAT}")
        chain = None if body["since"] is None else Chain.from_json(body["since"])
        return Identity(body["id"], body["text"], body["config"], tuple(body["adopted"]), chain)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise ValueError(f"does not fit format {FORMAT} ({error!r})") from error


def _recovered(folder: Path, config: bytes) -> Identity | None:
    """Return what run.json said, according to the manifests; None if no sound manifest has a provenance."""
    known = {path.name: provenance for path, provenance in _provenances(folder) if provenance is not None}
    if not known:
        return None
    if len({provenance.run for provenance in known.values()}) > 1:
        raise DamagedRecord(
            f"{folder / RUN} is missing or damaged, and the checkpoints are of different runs: "
            f"{', '.join(f'{name} of {provenance.run}' for name, provenance in known.items())}. Bring it back from a "
            "copy, or remove the checkpoints of other runs."
        )
    newest = list(known.values())[-1]
    changes = accepted_changes(folder, newest.run)
    first = changes[0].old if changes else newest.config_digest
    return Identity(newest.run, config.decode() if first == config_digest(config) else "", first)


def _provenances(folder: Path) -> Iterator[tuple[Path, Provenance | None]]:
    """Yield every checkpoint with a sound manifest and its provenance, oldest first."""
    for path in checkpoints.list_checkpoints(folder):
        try:
            body = checkpoints.read_manifest(path)
        except (checkpoints.DamagedCheckpoint, ValueError):
            continue
        yield path, None if body.get("run") is None else Provenance.from_json(body["run"])


# Changes of config.toml


def check_config(folder: Path, identity: Identity, data: bytes) -> str:
    """Return the text of config.toml; DamagedRecord unless it is what was written, or what was accepted last.

    data: the content of config.toml.
    """
    changes = accepted_changes(folder, identity.id)
    if config_digest(data) != (changes[-1].new if changes else identity.config_digest):
        raise DamagedRecord(
            f"{folder / CONFIG} is not what the run was written with, as {RUN} has it: "
            f"{_describe_edit(folder, identity, changes, data)}. Bring it back from a copy, or if the change is meant, "
            f"go on with it from the last checkpoint: tailopt resume {folder} --accept-config."
        )
    return config_text(folder / CONFIG, data)


def accepted_changes(folder: Path, id: str) -> list[Change]:
    """Return the accepted changes of config.toml, checked; none if there is no such file."""
    path, chain = folder / CHANGES, _digest(id.encode())
    changes: list[Change] = []
    lines = history.complete_lines(path)
    for number, (line, row) in enumerate(zip(lines, history.parse_lines(path, lines), strict=True), start=1):
        stated = row.pop("sha256", None)
        chain = _digest(chain.encode() + history.line(row))
        complete = row.keys() >= {*Change._fields}
        change = Change(**{key: row[key] for key in Change._fields}) if complete else None
        fits_digest = stated == chain and history.line({**row, "sha256": chain}) == line
        if change is None or not fits_digest or (changes and changes[-1].new != change.old):
            raise DamagedRecord(
                f"{path}, line {number}, is not what was written: it does not fit its digest, the lines before it and "
                f"the run in {RUN}. Bring the file that was changed back from a copy."
            )
        changes.append(change)
    return changes


def accept_change(folder: Path, round: int) -> list[list[Any]] | None:
    """Record that config.toml, as it is now, is accepted.

    Returns [setting, before, after] for each difference; None if it had not changed.

    round: of the last checkpoint.
    """
    data = disk.read(folder / CONFIG)
    identity = find_identity(folder, data)
    if identity is None:
        return None  # by a version without ids: its config.toml is adopted as it is when the run is resumed
    changes = accepted_changes(folder, identity.id)
    before = changes[-1].new if changes else identity.config_digest
    if config_digest(data) == before:
        return None
    now = parse_config(folder / CONFIG, config_text(folder / CONFIG, data))
    differences = difference(_last_accepted(identity, changes), by_dotted_name(now))
    row = {"round": round, "old": before, "new": config_digest(data), "difference": differences}
    chain = _digest(identity.id.encode())
    for line in history.complete_lines(folder / CHANGES):
        chain = history.parse_lines(folder / CHANGES, [line])[0]["sha256"]
    history.drop_torn_line(folder / CHANGES)
    history.append(folder / CHANGES, {**row, "sha256": _digest(chain.encode() + history.line(row))})
    disk.sync(folder / CHANGES)
    disk.sync(folder)
    return differences


def _describe_edit(folder: Path, identity: Identity, changes: list[Change], data: bytes) -> str:
    """Return in words how config.toml differs from what was accepted last."""
    before = _last_accepted(identity, changes)
    if not before:
        return f"its sha256 is {config_digest(data)[:12]}…, and was {identity.config_digest[:12]}…"
    try:
        now = parse_config(folder / CONFIG, config_text(folder / CONFIG, data))
    except ValueError:
        return "it is no longer TOML"
    return describe_difference(difference(before, by_dotted_name(now))[:5])


def _last_accepted(identity: Identity, changes: list[Change]) -> dict[str, Any]:
    """Return the settings that were accepted last, by their dotted names."""
    accepted = by_dotted_name(parse_config(Path(RUN), identity.text))
    for change in changes:
        for key, _, now in change.difference:
            accepted[key] = now
    return {key: value for key, value in accepted.items() if value is not None}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Checkpoints


def check_provenance(folder: Path, identity: Identity, path: Path, provenance: Provenance | None) -> None:
    """Raise OtherRun if a checkpoint is of another run, or of settings that this run never had."""
    if provenance is None:
        if stored_digest(path / checkpoints.MANIFEST) in identity.adopted:
            return
        why = f"it names no run, and was not there when {folder} became the run {identity.id}"
    elif provenance.run != identity.id:
        why = f"it is of the run {provenance.run}, and {folder} holds the run {identity.id}, by its {RUN}"
    elif provenance.config_digest not in {
        identity.config_digest,
        *(change.new for change in accepted_changes(folder, identity.id)),
    }:
        why = (
            f"it was written with another {CONFIG} (sha256 {provenance.config_digest[:12]}…), which this run never had"
        )
    else:
        return
    raise OtherRun(
        f"{path} is a checkpoint of another run: {why}. Take it out of {path.parent} to go on from an older one, or "
        "resume the run that it belongs to."
    )


def manifests_without_provenance(folder: Path) -> tuple[str, ...]:
    """Return the digests of the manifests that name no run."""
    return tuple(
        stored_digest(path / checkpoints.MANIFEST) for path, provenance in _provenances(folder) if provenance is None
    )
