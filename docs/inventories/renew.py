"""Compare the inventories in this folder with the published ones: `python docs/inventories/renew.py` (needs a network).

An inventory says on which page another project documents a name. `make docs` reads these files alone, so that the
guide builds without a network and the same everywhere. They are in the first format of Sphinx, which is plain text, and
list the names that signatures in the reference contain: to link another one, add its line. This script says which
lines differ from what is published, and exits with 1 if any does; `--write` corrects their addresses.
"""

import argparse
import sys
import urllib.request
from pathlib import Path

from sphinx.util.inventory import InventoryFile

HERE = Path(__file__).parent
PUBLISHED = {
    "python.inv": "https://docs.python.org/3/",
    "torch.inv": "https://docs.pytorch.org/docs/stable/",
}


def published(address: str) -> dict[str, str]:
    """The page of every Python name that a project documents."""
    with urllib.request.urlopen(f"{address}objects.inv", timeout=30) as answer:
        inventory = InventoryFile.loads(answer.read(), uri="")
    return {
        name: entry.uri.partition("#")[0]
        for kind, entries in inventory.data.items()
        if kind.startswith("py:")
        for name, entry in entries.items()
    }


def renewed(lines: list[str], pages: dict[str, str]) -> tuple[list[str], list[str]]:
    """The lines of an inventory with the addresses of `pages`, and what was wrong with them."""
    out, wrong = [], []
    for line in lines:
        if not line.startswith("#"):
            name, kind, page = line.split()
            if name not in pages:
                wrong.append(f"{name} is not documented there")
            elif pages[name] != page:
                wrong.append(f"{name} is on {pages[name]}, not on {page}")
                line = f"{name} {kind} {pages[name]}"
        out.append(line)
    return out, wrong


def main() -> int:
    """Compare all inventories; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="correct the addresses")
    write = parser.parse_args().write
    found = 0
    for file, address in PUBLISHED.items():
        lines, wrong = renewed((HERE / file).read_text(encoding="utf-8").splitlines(), published(address))
        for line in wrong:
            print(f"{file}: {line}")
        if write:
            (HERE / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
        found += len(wrong)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
