"""Check the links within the built guide: `python docs/check_links.py site`. Needs no network.

Every address within the guide must be a file, and what follows its # an element of that page. No page may load anything
from elsewhere: scripts, styles, fonts and pictures are in the folder. `make weblinks` checks other links.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("source", "src"), ("iframe", "src"), ("link", "href")}
# the rel of a <link> that only names another page
NOT_LOADED = {"canonical", "next", "prev", "search", "index", "author", "license"}
CSS_ADDRESS = re.compile(r"(?:url\(|@import )\s*[\"']?(?P<address>(?:https?:)?//[^\"')]+)")


class Page(HTMLParser):
    """The addresses that a page names or loads, and the elements that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.names: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.names |= {value for key in ("id", "name") if (value := values.get(key))}
        for key in ("href", "src"):
            address = values.get(key)
            if address is not None:
                self.links.add(address)
                if (tag, key) in LOADED and not NOT_LOADED & set((values.get("rel") or "").split()):
                    self.loaded.add(address)


def problems(site: Path) -> list[str]:
    """What is wrong with a built guide, one line each."""
    files = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]  # those are templates
    pages = {path.resolve(): Page(path) for path in files}
    if not pages:
        return [f"{site} has no page; `make docs` builds the guide"]
    found = []
    for path, page in pages.items():
        where = path.relative_to(site.resolve()).as_posix()
        found += [f"{where} loads {address}" for address in sorted(page.loaded) if urlsplit(address).netloc]
        for address in sorted(page.links):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{where} links to {address}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                found.append(f"{where} links to {address}, but that page has no such element")
    for style in sorted(site.rglob("*.css")):
        text = style.read_text(encoding="utf-8")
        found += [f"{style.relative_to(site)} loads {match['address']}" for match in CSS_ADDRESS.finditer(text)]
    return found


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    for line in [*wrong, f"{sys.argv[1]}: {len(wrong)} broken links or addresses that are loaded from elsewhere"]:
        print(line)
    sys.exit(int(bool(wrong)))
