"""The guide as a site: no warning, no network, every link leads somewhere, and its search works."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.report import browser

pytest.importorskip("sphinx", reason="the extra docs is not installed, or Python is older than 3.11")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WORDS = ["-W", "--keep-going", "-n"]  # every warning is an error, and so is a name in the reference that leads nowhere


def script(path: str) -> ModuleType:
    """A file of docs/ as a module."""
    found = importlib.util.spec_from_file_location(Path(path).stem, DOCS / path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def sphinx(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide without the outputs of notebooks, which have tests of their own."""
    folder = tmp_path_factory.mktemp("guide")
    result = sphinx(*WORDS, "-D", "nb_execution_mode=off", "-d", folder / "doctrees", DOCS, folder / "site")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert script("check_links.py").problems(site) == []


def test_what_is_wrong_with_a_site_is_found(tmp_path: Path) -> None:
    problems = script("check_links.py").problems
    assert problems(tmp_path) == [f"{tmp_path} has no page; `make docs` builds the guide"]
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html"></a><a href="#top"></a><a href="#gone"></a><a href="https://x.org"></a>'
        '<script src="https://cdn.org/x.js"></script><link rel="canonical" href="https://x.org">'
    )
    (tmp_path / "a.css").write_text("@font-face { src: url(https://fonts.org/f.woff2) }")
    assert problems(tmp_path) == [
        "a.html loads https://cdn.org/x.js",
        "a.html links to #gone, but that page has no such element",
        "a.html links to b.html, which does not exist",
        "a.css loads https://fonts.org/f.woff2",
    ]


def test_the_start_page_links_every_page(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    start = text[text.index("<article") : text.index("</article>")]  # without the list at the side
    linked = set(re.findall(r'href="([^"#]+\.html)', start))
    sources = [path for kind in ("*.md", "*.ipynb") for path in DOCS.rglob(kind) if "_" not in path.parts[-2][:1]]
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in sources}
    assert pages - {"index.html"} - linked == set()


def test_the_reference_links_to_torch_and_python(site: Path) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")
    for address in (
        "https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module",
        "https://docs.python.org/3/library/collections.abc.html#collections.abc.Mapping",
    ):
        assert f'href="{address}"' in page


def test_the_reference_shows_formulas_and_examples_as_code(site: Path) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")
    assert "m &lt;- beta * m" in page and "<blockquote>" not in page
    assert "&gt;&gt;&gt; " not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)


def test_formulas_need_no_script(site: Path) -> None:
    page = (site / "how-it-works.html").read_text(encoding="utf-8")
    assert page.count("<math") > 10
    assert not re.search(r"<script[^>]*mathjax", page, re.IGNORECASE)


def test_a_formula_that_cannot_be_drawn_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DOCS / '_extensions')!r})\n"
        "extensions = ['myst_parser', 'formulas']\nhtml_math_renderer = 'mathml'\n"
        "myst_enable_extensions = ['dollarmath']\n"
    )
    (tmp_path / "index.md").write_text("# Title\n\n$x + \\unheard{y}$\n")
    result = sphinx("-W", tmp_path, tmp_path / "site")
    assert result.returncode != 0
    assert "index.md:3" in result.stderr and "unheard" in result.stderr


@pytest.fixture
def tab() -> Iterator[browser.Tab]:
    """A browser for each test: what one page says late would be heard while another is open."""
    with browser.tab() as page:
        page.size(1280, 900)
        yield page


def requests_outside(tab: browser.Tab) -> list[str]:
    return [address for address in tab.requests() if not address.startswith(("file:", "data:"))]


def test_search_works_without_a_server(tab: browser.Tab, site: Path) -> None:
    """Titles; the lines of text below them appear only where a server has the pages, as browsers read no files."""
    links = "document.querySelectorAll('#search-results li a')"
    tab.open(site / "search.html", drawn=f"{links}.length > 3", query="?q=momentum")
    assert any("Momentum" in title for title in tab.value(f"[...{links}].map(link => link.textContent)"))
    assert requests_outside(tab) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_in_light_and_dark_without_a_complaint(tab: browser.Tab, site: Path, scheme: str) -> None:
    tab.scheme(scheme)
    tab.open(site / "how-it-works.html", drawn="document.readyState === 'complete' && document.querySelector('math')")
    assert tab.complaints() == []
    assert requests_outside(tab) == []
    bright = "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)"
    assert (sum(tab.value(bright)) > 3 * 128) == (scheme == "light")


def test_the_gallery_shows_every_example() -> None:
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    examples = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.toml")]
    assert [path.name for path in examples if f"../examples/{path.name}" not in page] == []


def names(inventory: str) -> list[list[str]]:
    lines = (DOCS / "inventories" / inventory).read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


@pytest.mark.parametrize(("inventory", "module"), [("torch.inv", "torch"), ("python.inv", "builtins")])
def test_every_name_of_an_inventory_exists(inventory: str, module: str) -> None:
    for name, _, _ in names(inventory):
        holder, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(holder or module), last), name


def test_an_inventory_is_compared_with_what_is_published() -> None:
    renewed = script("inventories/renew.py").renewed
    lines = ["# Project: torch", "torch.Tensor class tensors.html", "torch.Gone class gone.html"]
    assert renewed(lines, {"torch.Tensor": "moved.html"}) == (
        ["# Project: torch", "torch.Tensor class moved.html", "torch.Gone class gone.html"],
        ["torch.Tensor is on moved.html, not on tensors.html", "torch.Gone is not documented there"],
    )
    assert renewed(lines[:2], {"torch.Tensor": "tensors.html"}) == (lines[:2], [])


def test_published_pages_are_read_from_an_inventory_of_sphinx(site: Path) -> None:
    pages = script("inventories/renew.py").published(f"{site.as_uri()}/")
    assert pages["tailopt.BiClip"] == "reference.html"


def test_docstrings_become_restructuredtext() -> None:
    convert = script("_extensions/plain_docstrings.py").converted
    typed = (
        "One |g| * 2 of `a_b | c`.\n\n    p <- |g|\n\nAttributes:\n    u, d: 2 * x\n\nExamples:\n    >>> 2 * 3\n    6"
    )
    assert convert(typed) == (
        "One \\|g\\| \\* 2 of ``a_b | c``.\n\n.. code-block:: text\n\n    p <- |g|\n\n"
        "Attributes:\n    u,d: 2 \\* x\n\nExamples:\n    >>> 2 * 3\n    6"
    )
