"""Statements of the guide that were wrong once: the pages agree with the code, and old claims do not return."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from tailopt.cli.main import main
from tailopt.cli.study import STUDIES
from tailopt.studies import claims, drops
from tailopt.studies.search_spaces import SPACES
from tailopt.studies.tables import ranges_lines

ROOT = Path(__file__).parents[1]
RESULTS = sorted(path for path in (ROOT / "docs" / "results").rglob("*.md") if path.stem != "index")
PROSE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]


def flat(path: Path | str) -> str:
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_a_page_of_results_names_the_commit_that_it_belongs_to(page: Path) -> None:
    assert re.search(r"Measured (at|with the search ranges of) commit [0-9a-f]{7}\b", flat(page))


@pytest.mark.parametrize(
    "claim",
    [
        "Adam's quality at SGD's memory",
        "nothing here beats it there",
        "heavy-tailed, as it is in language models",
        "everything else as in the preset `paper`",
        "| reached at o_u = 0 |",
        "| at least oeps² |",
        "is plain to see",
    ],
)
def test_a_statement_that_was_wrong_does_not_come_back(claim: str) -> None:
    assert [path.name for path in PROSE if claim in flat(path)] == []


@pytest.mark.parametrize(
    ("page", "number"), [("docs/results/glue-mrpc.md", 8), ("docs/results/small/gradients.md", 12)]
)
def test_what_cannot_be_told_is_not_judged(page: str, number: int) -> None:
    assert re.findall(rf"Claim {number}: ([a-z ]+)\.", flat(page)) == ["cannot tell"]


BEFORE_THE_PROTOCOL = (
    *("glue-mrpc.md", "curves.md", "convex.md"),
    *("small/translation.md", "small/centralised.md", "small/federated.md", "small/pretraining.md"),
)


@pytest.mark.parametrize("page", BEFORE_THE_PROTOCOL)
def test_a_page_from_before_the_protocol_says_so(page: str) -> None:
    text = flat(f"docs/results/{page}")
    assert "before [the protocol](" in text and "comparisons.md) was in use" in text


@pytest.mark.parametrize("page", [page for page in RESULTS if "Sobol points of its own" in page.read_text()], ids=str)
def test_a_page_by_the_protocol_has_the_ranges_of_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (command,) = re.findall(r"by `tailopt study ([^`]*)`", text)
    name, *options = shlex.split(command)
    assert name in STUDIES
    names = {option.removeprefix("--") for option in options if option.startswith("--")}
    assert names <= {*STUDIES[name].OPTIONS, "quick"}
    (space,) = re.findall(r"Searched \(([a-z-]+)\)", text)
    algorithms = re.findall(r"^\| ([a-z0-9-]+) \| [^|]* \| (?:i|o|m|w)[a-z_]+ ", text, re.MULTILINE)
    assert "\n".join(ranges_lines(SPACES[space], [*dict.fromkeys(algorithms)])) in text


def test_the_page_on_the_paper_has_the_claims_of_the_code_and_names_every_study() -> None:
    page = (ROOT / "docs" / "reproduce-the-paper.md").read_text(encoding="utf-8")
    assert [number for number, text in claims.TEXTS.items() if f"\n| {number} | {text} |\n" not in page] == []
    assert [name for name in STUDIES if f"`{name}`" not in page] == []


def test_both_sides_are_cited_on_noise_in_language_models() -> None:
    text = flat("docs/when-it-does-not-help.md")
    assert all(number in text for number in ("arXiv 1912.03194", "arXiv 2304.13960", "arXiv 2402.19449"))


def test_the_help_of_study_names_the_presets_of_drops(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "of drops: " in said
    assert all(preset in said.split("of drops: ")[1].split("--")[0] for preset in drops.PRESETS)


def test_whom_one_trusts_is_said_and_found() -> None:
    page = flat("docs/whom-you-trust.md")
    for said in (
        "Nothing is encrypted, and no node is authenticated",
        "Access to the store's port is enough to end the run",
        "Robust means protect against wrong displacements, not against a wrong owner",
        "Under torchrun this is not possible",
        "ever unpickled",
        "against accidents",
    ):
        assert said in page
    for link in ("README.md", "docs/real-nodes.md", "docs/slow-network.md", "SECURITY.md"):
        assert "whom-you-trust.md" in flat(link)
    assert "Whom you trust <whom-you-trust>" in flat("docs/index.md")
    assert "private security advisory" in flat("SECURITY.md") and "@" not in flat("SECURITY.md")


UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve"}


def test_nothing_of_the_library_unpickles() -> None:
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [path.name for alias in node.names if alias.name.split(".")[0] in UNPICKLING]
            elif isinstance(node, ast.ImportFrom):
                found += [path.name] * ((node.module or "").split(".")[0] in UNPICKLING)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found += [path.name] * (ast.unparse(node.func) == "torch.load" or "_object" in node.func.attr)
    assert found == []
