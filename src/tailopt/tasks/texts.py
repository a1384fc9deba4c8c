"""Texts by name, for tasks in which every node has texts of its own.

    shakespeare   a text is what a role of a play speaks, by LEAF's rules, in the complete works of 1994 (Project
                  Gutenberg's 100)
    philosopher   a text is one of eight works, each in a file that has its author in its name
    texts         a text is a file of a folder

Blanks at the end of a line are no text. With them "  An Apothecary.  ", in a list of persons, would look like the
beginning of a speech, and be one role more than LEAF has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from tailopt.tasks import files, hub, pretrained

WORKS = ("kant", "hazlitt", "austen", "plato", "tolstoy", "federalist", "dumas", "dostoevsky")
ENDINGS = (".txt", ".md", ".text")

# LEAF's rules: a speech begins two blanks in, with the role and a full stop, and goes on four blanks in. One play is
# set differently in this edition: without blanks, and with a remark in "<" that belongs to nobody.
BYLINE, POEMS, FLUSH = "by William Shakespeare", "THE SONNETS", "THE COMEDY OF ERRORS"
SPEECH, GOES_ON = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)")
FLUSH_SPEECH, FLUSH_GOES_ON = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"(.*)")
WINDOW = 80  # characters of LEAF's samples, each with the next character as its label


def lines_by_role(text: str) -> dict[tuple[str, str], list[str]]:
    """Return the lines of every (play, role), without roles of at most two lines and plays of a single role.

    Examples:
        >>> play = "A PLAY\\n\\nby William Shakespeare\\n\\n  KING. Who?\\n    I hear.\\n    Speak.\\n  Fool. No."
        >>> lines_by_role(play)
        {('A PLAY', 'KING'): ['Who?', 'I hear.', 'Speak.']}
    """
    lines = [line.rstrip() for line in text.splitlines()]
    plays: list[tuple[str, dict[str, list[str]]]] = []
    speaking: list[str] | None = None
    for i, line in enumerate(lines):
        if BYLINE in line:
            above = reversed(lines[max(0, i - 7) : max(0, i - 1)])
            plays.append((next((words.strip() for words in above if words), ""), {}))
            speaking = None
        elif plays:
            title, play = plays[-1]
            speaking = _add_line(line, title == FLUSH, play, speaking)
    return {
        (title, role): spoken
        for title, play in plays
        if title and title != POEMS and len(play) > 1
        for role, spoken in play.items()
        if len(spoken) > 2
    }


def _add_line(line: str, flush: bool, play: dict[str, list[str]], speaking: list[str] | None) -> list[str] | None:
    """Add a line to the role that speaks it, and return the lines of the role whose speech may go on."""
    begins = (FLUSH_SPEECH if flush else SPEECH).match(line)
    if begins:
        role = begins[1].upper()  # Sir Toby is SIR TOBY
        if flush and role.startswith("ACT "):
            return None
        play.setdefault(role, []).append(begins[2])
        return play[role]
    goes_on = (FLUSH_GOES_ON if flush else GOES_ON).match(line)
    if speaking is None or not goes_on:
        return speaking
    if flush and goes_on[1].startswith("<"):
        return None
    speaking.append(goes_on[1])
    return speaking


def leaf_sample_count(lines: Iterable[str], window: int = WINDOW) -> int:
    """Count the samples that LEAF makes of a role: its characters less a window, lines joined, repeated blanks as one.

    Examples:
        >>> leaf_sample_count(["four", "more   so"], window=10)
        3
    """
    return max(0, len(re.sub("  +", " ", "".join(f"{line} " for line in lines))) - window)


def texts_of_samples(owners: Iterable[str], windows: Iterable[str], following: Iterable[str]) -> dict[str, str]:
    """Put texts together from LEAF's samples: each sample of an owner begins one character after the one before it.

    Examples:
        >>> texts_of_samples(["a", "a", "b"], ["abc", "bcd", "xyz"], ["d", "e", "!"])
        {'a': 'abcde', 'b': 'xyz!'}
    """
    parts_by_owner: dict[str, list[str]] = {}
    for owner, window, character in zip(owners, windows, following, strict=True):
        parts_by_owner.setdefault(owner, [window]).append(character)
    return {owner: "".join(parts) for owner, parts in parts_by_owner.items()}


@lru_cache(maxsize=2)
def load_texts(kind: str, data: str) -> Mapping[str, str]:
    """Load the texts of a task by name, from a path or from the hub; the head of this file describes the kinds."""
    path = Path(data).expanduser()
    if not data:
        raise FileNotFoundError(f"Invalid data: none are named. {_NEEDED[kind]}: --data PATH.")
    if not path.exists():
        if pretrained.looks_like_a_path(data) or path.suffix or kind == "philosopher":
            raise FileNotFoundError(f"Invalid data: there is no {data!r}. {_NEEDED[kind]}: --data PATH.")
        return _from_hub(kind, data)
    texts = _read_files(path)
    if kind == "shakespeare":
        return _by_role(texts, path)
    if kind == "philosopher":
        return _by_work(texts, path)
    return texts


_NEEDED = {
    "shakespeare": "Give the complete works in the edition of 1994 (Project Gutenberg's 100.txt, also zipped)",
    "philosopher": f"Give a folder of text files, one for each of {', '.join(WORKS)}",
    "texts": f"Give a folder of text files ({', '.join(ENDINGS)}, also .gz or .xz)",
    "pretraining": f"Give a folder of text files ({', '.join(ENDINGS)}, also .gz or .xz)",
}


def _read_files(path: Path) -> dict[str, str]:
    """Read the text files at a path; their names lose their endings."""
    if path.is_file() and path.suffix != ".zip":
        names, folder = [files.without_compression(path.name)], files.Folder(path.parent, {path.name: path})
    else:
        folder = files.Folder.of(path)
        plain = map(files.without_compression, folder.names())
        names = [name for name in plain if name.lower().endswith(ENDINGS)]
    if not names:
        raise FileNotFoundError(f"Invalid data: {path} has no text files; need {', '.join(ENDINGS)}, also .gz or .xz.")
    try:
        return {name.rsplit(".", 1)[0]: folder.text(name) for name in names}
    except UnicodeDecodeError as error:
        raise ValueError(f"Invalid data: a file of {path} is not UTF-8 ({error}). Convert it.") from None


def _by_role(texts: Mapping[str, str], path: Path) -> dict[str, str]:
    chosen = [text for name, text in texts.items() if "shakespeare" in name.lower() or name == "100" or len(texts) == 1]
    lines = {name: spoken for text in chosen for name, spoken in lines_by_role(text).items()}
    if not lines:
        raise ValueError(f"Invalid data: no roles were found in {path}. {_NEEDED['shakespeare']}.")
    return {f"{play}: {role}": "\n".join(spoken) + "\n" for (play, role), spoken in lines.items()}


def _by_work(texts: Mapping[str, str], path: Path) -> dict[str, str]:
    works = {}
    for work in WORKS:
        fitting = [name for name in texts if work in name.lower()]
        if len(fitting) != 1:
            raise ValueError(
                f"Invalid data: {path} has {len(fitting)} text files with {work!r} in their names; need one of each "
                f"of {', '.join(WORKS)}. For other texts there is the task texts."
            )
        works[fitting[0]] = texts[fitting[0]]
    return works


def _from_hub(kind: str, data: str) -> dict[str, str]:
    """Read LEAF's samples for Shakespeare; otherwise the column "text", as a single text."""
    rows = hub.dataset(data, split="train")
    if kind == "shakespeare":
        files.check_columns(rows.column_names, ("character_id", "x", "y"), data)
        return texts_of_samples(rows["character_id"], rows["x"], rows["y"])
    files.check_columns(rows.column_names, ("text",), data)
    if kind == "texts":
        raise ValueError(
            f"Invalid data: {data!r} of the hub is one text, and the task texts needs several. {_NEEDED[kind]}."
        )
    return {data: "\n".join(rows["text"])}
