"""Every python block of README.md and docs/*.md runs unchanged, in a namespace of its own, and imports what it uses.

A block whose first line is `# continues the first block` or `# continues the block above` also has the values, but not
the imports, of that block of the page. A comment directly before a block names a package that it needs
(`<!-- needs: transformers -->`, several allowed), or the reason why it cannot run here (`<!-- no-run: two GPUs -->`).
If a block of text follows directly, it is what the block printed.
"""

import ast
import builtins
import importlib.util
import re
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "diff", "bash", "text", "bibtex", "toml", "{eval-rst}"}

COMMENT = re.compile(r"^\s*<!--\s*(?P<key>needs|no-run):(?P<value>.*?)-->\s*$")
FENCE = re.compile(r"^(?P<indent>\s*)```(?P<language>\S*)\s*$")
CONTINUES = re.compile(r"# continues the (?P<which>first block|block above)\n")
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)\s]*)?\)")


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line of code, from 1
    code: str
    needs: tuple[str, ...]
    no_run: str | None
    output: str | None = None  # the text below a python block


def blocks(text):
    """The fenced blocks of a page, each with the comments directly before it."""
    lines, found, needs, no_run, between, i = text.splitlines(), [], [], None, "", 0
    while i < len(lines):
        if comment := COMMENT.match(lines[i]):
            if comment["key"] == "needs":
                needs.append(comment["value"].strip())
            else:
                no_run = comment["value"].strip()
        elif fence := FENCE.match(lines[i]):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == "```")
            code = textwrap.dedent("\n".join(lines[i + 1 : end])) + "\n"
            last = found[-1] if found else None
            if fence["language"] == "text" and last is not None and last.language == "python" and not between.strip():
                found[-1] = replace(last, output=code)
            found.append(Block(fence["language"], i + 2, code, tuple(needs), no_run))
            between = ""
            needs, no_run, i = [], None, end
        elif needs or no_run is not None:
            assert not lines[i].strip(), f"line {i + 1}: a needs or no-run comment must be directly before its block"
        else:
            between += lines[i]
        i += 1
    assert not needs, "a needs comment without a block"
    assert no_run is None, "a no-run comment without a block"
    return found


def name(page):
    return page.relative_to(ROOT).as_posix()


def python_blocks(page):
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python"]


def imports(code):
    """The names that a block imports."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in node.names}


def values(code):
    """The names that a block binds anywhere, other than by an import."""
    nodes = list(ast.walk(ast.parse(code)))
    return (
        {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        | {node.arg for node in nodes if isinstance(node, ast.arg)}
    )


def missing(code, given=frozenset()):
    """The names that a block uses and has from nowhere."""
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    used = {node.id for node in found if isinstance(node.ctx, ast.Load)}
    return used - imports(code) - values(code) - given - set(dir(builtins))


def continued(block, earlier):
    """What a block begins with, of what `earlier` has for each of the blocks before it; None for nothing."""
    which = CONTINUES.match(block.code)
    return None if which is None else earlier[0 if which["which"] == "first block" else -1]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_python_block_imports_what_it_uses(page):
    has = []
    for block in python_blocks(page):
        given = continued(block, has) or frozenset()
        assert missing(block.code, given) == set(), f"{name(page)}:{block.line}"
        has.append(given | values(block.code))


@pytest.mark.parametrize("page", PAGES, ids=name)
# Trainer, Accelerate and Lightning warn about workers and defaults; ours must not.
@pytest.mark.filterwarnings("ignore", "error:::tailopt")
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespaces, absent = [], set()
    with torch.random.fork_rng(devices=[]):
        for block in python_blocks(page):
            namespace = {"__name__": "__main__"} | (continued(block, namespaces) or {})
            namespaces.append(namespace)
            lacks = {module for module in block.needs if importlib.util.find_spec(module) is None}
            absent |= lacks
            if block.no_run is None and not lacks:
                code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
                exec(code, namespace)
                printed = capsys.readouterr().out
                assert block.output is None or printed.split() == block.output.split(), f"{name(page)}:{block.line}"
    if absent:
        pytest.skip(f"the blocks that need {', '.join(sorted(absent))} did not run; the others did")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_what_they_are(page):
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language in LANGUAGES, f"{name(page)}:{block.line - 1}: language {block.language!r}"
        assert block.no_run != "", f"{name(page)}:{block.line - 1}: no-run needs a reason"
        assert "" not in block.needs, f"{name(page)}:{block.line - 1}: needs what?"
        if block.no_run is not None:  # it must at least be python
            compile(block.code, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_has_no_markup_of_mkdocs(page):
    """Sphinx would print it as it is: `!!! note` is `:::{note}` here, and `::: name` an autodoc directive."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match(r"\s*(!!! |\?\?\? |::: )", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    targets = [m["target"] for m in LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [t for t in targets if not re.match(r"[a-z]+:", t)]
    assert [t for t in local if not (page.parent / t).exists()] == []


def test_blocks_are_found():
    page = "\n<!-- needs: one -->\n<!-- needs: two -->\n```python\na = 1\n```\n\n    ```diff\n    +b\n    ```\n"
    first, second = blocks(page)
    assert first == Block("python", 5, "a = 1\n", ("one", "two"), None)
    assert second == Block("diff", 9, "+b\n", (), None)
    printing, printed = blocks("```python\nprint(1)\n```\n\n```text\n1\n```\n")
    assert printing.output == printed.code == "1\n"
    assert [block.output for block in blocks("```python\n```\nIt says\n```text\n1\n```\n")] == [None, None]
    with pytest.raises(AssertionError, match="directly before"):
        blocks("<!-- no-run: why -->\ntext\n```python\n```\n")


def test_what_a_block_lacks_is_found():
    assert missing("import a\nb = [a.c(d) for d in e]") == {"e"}
    assert missing("def f(x):\n    return x + print(y)") == {"y"}
    above = Block("python", 1, "# continues the block above\nprint(x)\n", (), None)
    assert continued(above, [{"x"}, {"y"}]) == {"y"}
    first = Block("python", 1, "# continues the first block\nprint(x)\n", (), None)
    assert continued(first, [{"x"}, {"y"}]) == {"x"}
    assert continued(Block("python", 1, "print(x)\n", (), None), [{"x"}]) is None
