"""Every python block of README.md and docs/*.md runs unchanged, in one namespace per page.

A comment directly before a block names a package that it needs (`<!-- needs: transformers -->`, several allowed), or
the reason why it cannot run here (`<!-- no-run: two GPUs -->`).
"""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "diff", "bash", "text", "bibtex", "toml"}

COMMENT = re.compile(r"^\s*<!--\s*(?P<key>needs|no-run):(?P<value>.*?)-->\s*$")
FENCE = re.compile(r"^(?P<indent>\s*)```(?P<language>\S*)\s*$")
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)\s]*)?\)")


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line of code, from 1
    code: str
    needs: tuple[str, ...]
    no_run: str | None


def blocks(text):
    """The fenced blocks of a page, each with the comments directly before it."""
    lines, found, needs, no_run, i = text.splitlines(), [], [], None, 0
    while i < len(lines):
        if comment := COMMENT.match(lines[i]):
            if comment["key"] == "needs":
                needs.append(comment["value"].strip())
            else:
                no_run = comment["value"].strip()
        elif fence := FENCE.match(lines[i]):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == "```")
            code = textwrap.dedent("\n".join(lines[i + 1 : end])) + "\n"
            found.append(Block(fence["language"], i + 2, code, tuple(needs), no_run))
            needs, no_run, i = [], None, end
        elif needs or no_run is not None:
            assert not lines[i].strip(), f"line {i + 1}: a needs or no-run comment must be directly before its block"
        i += 1
    assert not needs, "a needs comment without a block"
    assert no_run is None, "a no-run comment without a block"
    return found


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
# Trainer, Accelerate and Lightning warn about workers and defaults; ours must not.
@pytest.mark.filterwarnings("ignore", "error:::tailopt")
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace, missing = {"__name__": "__main__"}, set()
    with torch.random.fork_rng(devices=[]):
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language != "python" or block.no_run is not None:
                continue
            absent = {module for module in block.needs if importlib.util.find_spec(module) is None}
            missing |= absent
            if not absent:
                code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
                exec(code, namespace)
    if missing:
        pytest.skip(f"the blocks that need {', '.join(sorted(missing))} did not run; the others did")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_what_they_are(page):
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language in LANGUAGES, f"{name(page)}:{block.line - 1}: language {block.language!r}"
        assert block.no_run != "", f"{name(page)}:{block.line - 1}: no-run needs a reason"
        assert "" not in block.needs, f"{name(page)}:{block.line - 1}: needs what?"
        if block.no_run is not None:  # it must at least be python
            compile(block.code, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    targets = [m["target"] for m in LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [t for t in targets if not re.match(r"[a-z]+:", t)]
    assert [t for t in local if not (page.parent / t).exists()] == []


def test_the_guide_builds(tmp_path):
    """Strict: a dead link, a name the reference cannot find or a malformed docstring is an error."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    page = (tmp_path / "site/reference/index.html").read_text(encoding="utf-8")
    # A doctest outside an "Examples:" section is read as Markdown, and >>> as a quotation in a quotation.
    assert "<blockquote>" not in page, "a doctest that is not rendered as code; is its section called Examples?"


def test_blocks_are_found():
    page = "\n<!-- needs: one -->\n<!-- needs: two -->\n```python\na = 1\n```\n\n    ```diff\n    +b\n    ```\n"
    first, second = blocks(page)
    assert first == Block("python", 5, "a = 1\n", ("one", "two"), None)
    assert second == Block("diff", 9, "+b\n", (), None)
    with pytest.raises(AssertionError, match="directly before"):
        blocks("<!-- no-run: why -->\ntext\n```python\n```\n")
