"""Texts by name: the roles of plays, by LEAF's rules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tailopt.tasks import files, texts
from tailopt.tasks.texts import leaf_sample_count, lines_by_role

DATA = os.environ.get("TAILOPT_TEST_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="needs the data folder: TAILOPT_TEST_DATA")

PLAYS = """\
THE SONNETS

by William Shakespeare

  From fairest. We desire increase,
    That thereby beauty's rose might never die,

1602

ANY PLAY

by William Shakespeare

  An Apothecary.   \x20
  KING. Who speaks?
    I hear.

          Enter a Fool
  Sir Fool. Nobody,
    nobody.
  KING. Nobody!
   Three blanks belong to nobody.
  SIR FOOL. Not I.
  PAGE. Two lines
    are too few.

THE COMEDY OF ERRORS

by William Shakespeare

ACT I. SCENE 1
DUKE. At the margin
one goes on
at the margin.
<this is nobody's>
nor is this
MERCHANT. So
it is,

indeed.
"""


def test_roles_are_found_by_leafs_rules():
    assert lines_by_role(PLAYS) == {
        ("ANY PLAY", "KING"): ["Who speaks?", "I hear.", "Enter a Fool".rjust(18), "Nobody!"],
        ("ANY PLAY", "SIR FOOL"): ["Nobody,", "nobody.", "Not I."],
        ("THE COMEDY OF ERRORS", "DUKE"): ["At the margin", "one goes on", "at the margin."],
        ("THE COMEDY OF ERRORS", "MERCHANT"): ["So", "it is,", "", "indeed."],
    }


def test_trailing_blanks_do_not_begin_a_speech():
    kept = lines_by_role("\n".join(line.rstrip() for line in PLAYS.splitlines()))
    assert kept == lines_by_role(PLAYS) and not any("APOTHECARY" in role for _, role in kept)


@needs_data
def test_shakespeare_has_leafs_users_and_two_samples_more():
    text = files.read(Path(str(DATA)) / "text" / "shakespeare-leaf.txt.xz")
    sizes = [leaf_sample_count(lines) for lines in lines_by_role(text).values()]
    # LEAF: 1,129 users with a sample, 4,226,158 samples; the paper: 1,144 nodes, those without a sample counted. LEAF
    # does not cut trailing blanks; on this copy of the text its rules then give 1,130 users and 4,226,206 samples. So
    # it counted another copy (where it got its text has moved, says its issue 13), in which at least the Apothecary's
    # line of the next test has none. Where that copy lacks two more characters, nobody can tell without it.
    assert len(sizes) == 1144
    assert sum(size > 0 for size in sizes) == 1129
    assert sum(sizes) == 4_226_158 + 2


@needs_data
def test_the_role_that_only_trailing_blanks_make_is_the_apothecary():
    text = files.read(Path(str(DATA)) / "text" / "shakespeare-leaf.txt.xz")
    (number,) = [i for i, line in enumerate(text.split("\n")) if line.strip() == "An Apothecary."]
    lines = text.split("\n")
    assert lines[number] != lines[number].rstrip()  # this is what made it a role
    # with a word behind the full stop, which the rules cannot tell from blanks, there is one role more, of 46 samples
    lines[number] = lines[number].rstrip() + " |"
    found = lines_by_role("\n".join(lines))
    (extra,) = found.keys() - lines_by_role(text).keys()
    assert extra == ("THE TRAGEDY OF ROMEO AND JULIET", "AN APOTHECARY")
    assert leaf_sample_count(["", *found[extra][1:]]) == 46


def test_samples_of_leaf_can_be_read_back():
    text = "the quality of mercy is not strained"
    windows = [(text[i : i + 5], text[i + 5]) for i in range(len(text) - 5)]
    assert texts.texts_of_samples(["a"] * len(windows), *zip(*windows, strict=True)) == {"a": text}
