"""Which run a folder holds, and by which settings: run.json, beside config.toml.

    run.json                sealed, written once: the run's id, config.toml as it was written, and its sha256
    config-changes.jsonl    a row for every change of config.toml that was accepted

Every manifest repeats the id and the digest of config.toml, so a checkpoint of another run, or by other settings, is
refused; and a damaged run.json can be put together from the manifests. A row of config-changes.jsonl says after which
round, the old digest, the new one and the difference by setting. Its "sha256" chains it to the rows before it:

    h_0 = sha256(run id),    h_t = sha256(h_{t-1} + row t without "sha256")

A folder from before there was a run.json gets one when it is first resumed. It lists the seals of the manifests that
were there, which hold no id, and the chain of the rows that were there.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from uuid import uuid4

from tailopt.optional import require
from tailopt.records import checkpoints, disk, history
from tailopt.records.ledger import Chain, Stamp
from tailopt.records.seals import DamagedRecord, seal, sealed, unsealed

RUN, CONFIG, CHANGES, SEAL = "run.json", "config.toml", "config-changes.jsonl", "history.seal.json"
FORMAT = 1
_NONE = object()


class OtherRun(ValueError):
    """A checkpoint belongs to another run than the folder in which it lies."""


@dataclass(frozen=True)
class Identity:
    """What run.json says.

    Args:
        id: of the run, random.
        text: config.toml as it was written; "" where that is not known any more.
        config: its sha256.
        adopted: of a folder from before there were ids: the seals of the manifests that were there.
        since: of such a folder: the chain of the rows that were there.
    """

    id: str
    text: str
    config: str
    adopted: tuple[str, ...] = ()
    since: Chain | None = None


class Change(NamedTuple):
    """An accepted change of config.toml: after which round, digests, and [setting, before, after] for each."""

    round: int
    old: str
    new: str
    difference: list[list[Any]]


def fresh_id() -> str:
    """An id for a new run."""
    return uuid4().hex


def made(text: str, id: str, adopted: tuple[str, ...] = (), since: Chain | None = None) -> Identity:
    """The identity of a run with that config.toml."""
    return Identity(id, text, digest(text.encode()), adopted, since)


def digest(data: bytes) -> str:
    """Of config.toml."""
    return hashlib.sha256(data).hexdigest()


def write(folder: Path, identity: Identity) -> None:
    """Write run.json, all at once."""
    body = {
        "format": FORMAT,
        "id": identity.id,
        "config": identity.config,
        "text": identity.text,
        "adopted": list(identity.adopted),
        "since": None if identity.since is None else list(identity.since),
    }
    disk.replace(folder / RUN, sealed(body))


def of(folder: Path, config: bytes) -> Identity | None:
    """Which run a folder holds: by run.json, or where that is damaged by the manifests, with a warning.

    None in a folder from before there were ids.

    config: config.toml as it is now.
    """
    wrong = "is missing"
    try:
        if (known := _read(folder)) is not None:
            return known
    except ValueError as error:
        wrong = str(error)
    known = _recovered(folder, config)
    if known is not None:
        said = f"{folder / RUN} {wrong}. What it said is taken from the checkpoints."
        warnings.warn(said, UserWarning, stacklevel=4)
        return known
    if wrong == "is missing" and not (folder / SEAL).exists():
        return None
    raise DamagedRecord(
        f"{folder / RUN} {wrong}, and no checkpoint says what was in it. Bring it back from a copy, or begin again in "
        "another folder."
    )


def mend(folder: Path, known: Identity) -> None:
    """Write a run.json again that could not be read."""
    try:
        if _read(folder) is not None:
            return
    except ValueError:
        pass
    write(folder, known)


def _read(folder: Path) -> Identity | None:
    """What run.json says; None where there is none. ValueError, with what is wrong with it as a predicate."""
    try:
        body = unsealed(folder / RUN)
        if type(body["format"]) is int and body["format"] > FORMAT:
            raise DamagedRecord(
                f"{folder / RUN} has format {body['format']}, this tailopt reads formats up to {FORMAT}. Upgrade "
                "tailopt-torch."
            )
        texts = [body["id"], body["text"], body["config"], *body["adopted"]]
        if body["format"] != FORMAT or any(type(text) is not str for text in texts):
            raise ValueError(f"does not fit format {FORMAT}")
        since = None if body["since"] is None else Chain.stated(body["since"])
        return Identity(body["id"], body["text"], body["config"], tuple(body["adopted"]), since)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise ValueError(f"does not fit format {FORMAT} ({error!r})") from error


def _recovered(folder: Path, config: bytes) -> Identity | None:
    """What run.json said, by the manifests of the run; None where no sound one says anything."""
    stamps = {path.name: stamp for path, stamp in _stamps(folder) if stamp is not None}
    if not stamps:
        return None
    if len({stamp.run for stamp in stamps.values()}) > 1:
        raise DamagedRecord(
            f"{folder / RUN} is missing or damaged, and the checkpoints are of different runs: "
            f"{', '.join(f'{name} of {stamp.run}' for name, stamp in stamps.items())}. Bring it back from a copy, or "
            "remove the checkpoints of other runs."
        )
    newest = list(stamps.values())[-1]
    changed = changes(folder, newest.run)
    first = changed[0].old if changed else newest.config
    return Identity(newest.run, config.decode() if first == digest(config) else "", first)


def _stamps(folder: Path) -> Iterator[tuple[Path, Stamp | None]]:
    """Of every checkpoint with a sound manifest, oldest first."""
    for path in checkpoints.every(folder):
        try:
            body = checkpoints.manifest(path)
        except (checkpoints.DamagedCheckpoint, ValueError):
            continue
        yield path, None if body.get("run") is None else Stamp.stated(body["run"])


# Settings


def settings(path: Path, text: str) -> dict[str, Any]:
    """TOML as a dict; what is none is named with its file."""
    try:
        found: dict[str, Any] = needed("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)
        return found
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no TOML ({error}). Mend it, or bring it back from a copy.") from error


def decoded(path: Path, data: bytes) -> str:
    """The text of config.toml."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}). Mend it, or bring it back from a copy.") from error


def check_settings(folder: Path, identity: Identity, data: bytes) -> str:
    """The text of config.toml, if it is what was written, or what was accepted last."""
    changed = changes(folder, identity.id)
    if digest(data) != (changed[-1].new if changed else identity.config):
        raise DamagedRecord(
            f"{folder / CONFIG} is not what the run was written with, as {RUN} has it: "
            f"{_told(folder, identity, changed, data)}. Bring it back from a copy; or, if the change is meant, go on "
            f"with it from the last checkpoint: tailopt resume {folder} --accept-config."
        )
    return decoded(folder / CONFIG, data)


def changes(folder: Path, id: str) -> list[Change]:
    """The accepted changes of config.toml, checked; none where there is no such file."""
    path, at = folder / CHANGES, digest(id.encode())
    found: list[Change] = []
    lines = history.whole_lines(path)
    for number, (line, row) in enumerate(zip(lines, history.parsed(path, lines), strict=True), start=1):
        stated = row.pop("sha256", None)
        at = digest(at.encode() + history.line(row))
        try:
            change = Change(row["round"], row["old"], row["new"], row["difference"])
        except KeyError:
            stated = None
        if stated != at or history.line({**row, "sha256": at}) != line or (found and found[-1].new != change.old):
            raise DamagedRecord(
                f"{path}, line {number}, is not what was written: it does not fit its digest, the lines before it and "
                f"the run in {RUN}. Bring the file that was changed back from a copy."
            )
        found.append(change)
    return found


def accept(folder: Path, round: int) -> list[list[Any]] | None:
    """Take config.toml over as it is now; the difference by setting, or None where it had not changed.

    round: of the last checkpoint.
    """
    data = disk.read(folder / CONFIG)
    identity = of(folder, data)
    if identity is None:
        return None  # from before there were ids: what is there is taken over when the run is resumed
    changed = changes(folder, identity.id)
    before = changed[-1].new if changed else identity.config
    if digest(data) == before:
        return None
    now = settings(folder / CONFIG, decoded(folder / CONFIG, data))
    difference = _difference(_accepted(identity, changed), now)
    row = {"round": round, "old": before, "new": digest(data), "difference": difference}
    at = digest(identity.id.encode())
    for line in history.whole_lines(folder / CHANGES):
        at = history.parsed(folder / CHANGES, [line])[0]["sha256"]
    history.mend(folder / CHANGES)
    history.append(folder / CHANGES, {**row, "sha256": digest(at.encode() + history.line(row))})
    disk.sync(folder / CHANGES)
    disk.sync(folder)
    return difference


def told(difference: list[list[Any]]) -> str:
    """A difference in words.

    Examples:
        >>> told([["settings.ilr", 0.5, 0.7], ["guard", None, True]])
        'settings.ilr is 0.7, and was 0.5; guard is True, and was not there'
    """
    words = [
        f"{key} is {'not there' if now is None else repr(now)}, and was {'not there' if then is None else repr(then)}"
        for key, then, now in difference
    ]
    return "; ".join(words) or "the settings are the same, in other bytes"


def _told(folder: Path, identity: Identity, changed: list[Change], data: bytes) -> str:
    before = _accepted(identity, changed)
    if not before:
        return f"its sha256 is {digest(data)[:12]}…, and was {identity.config[:12]}…"
    try:
        now = settings(folder / CONFIG, decoded(folder / CONFIG, data))
    except ValueError:
        return "it is no TOML any more"
    return told(_difference(before, now)[:5])


def _accepted(identity: Identity, changed: list[Change]) -> dict[str, Any]:
    """The settings before a change, by their dotted names."""
    before = _flat(settings(Path(RUN), identity.text))
    for change in changed:
        for key, _, now in change.difference:
            before[key] = now
    return {key: value for key, value in before.items() if value is not None}


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[list[Any]]:
    after = _flat(now)
    keys = [*before, *(key for key in after if key not in before)]
    return [[key, before.get(key), after.get(key)] for key in keys if before.get(key, _NONE) != after.get(key, _NONE)]


def _flat(value: Mapping[str, Any], ahead: str = "") -> dict[str, Any]:
    """Settings by dotted names; an empty table is one too, a date is its text."""
    found: dict[str, Any] = {}
    for key, held in value.items():
        if isinstance(held, dict) and held:
            found |= _flat(held, f"{ahead}{key}.")
        else:
            found[f"{ahead}{key}"] = held if isinstance(held, bool | int | float | str | list | dict) else str(held)
    return found


def needed(package: str) -> ModuleType:
    """Import a package that only records need."""
    module: ModuleType = require(package, f"Run folders need {package}", extra="runs")
    return module


# Checkpoints


def check_stamp(folder: Path, identity: Identity, path: Path, stamp: Stamp | None) -> None:
    """Refuse a checkpoint of another run, or by settings that this run never had."""
    if stamp is None:
        if seal(path / checkpoints.MANIFEST) in identity.adopted:
            return
        why = f"it names no run, and was not there when {folder} became the run {identity.id}"
    elif stamp.run != identity.id:
        why = f"it is of the run {stamp.run}, and {folder} holds the run {identity.id}, by its {RUN}"
    elif stamp.config not in {identity.config, *(change.new for change in changes(folder, identity.id))}:
        why = f"it was written with another {CONFIG} (sha256 {stamp.config[:12]}…), which this run never had"
    else:
        return
    raise OtherRun(
        f"{path} is a checkpoint of another run: {why}. Take it out of {path.parent} to go on from an older one, or "
        "resume the run that it belongs to."
    )


def seals(folder: Path) -> tuple[str, ...]:
    """The seals of the manifests that are there and name no run."""
    return tuple(seal(path / checkpoints.MANIFEST) for path, stamp in _stamps(folder) if stamp is None)
