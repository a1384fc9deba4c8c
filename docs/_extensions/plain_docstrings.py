"""Docstrings of tailopt are plain text for terminals; this turns them into what autodoc reads, reStructuredText.

Indented formulas and tables are shown as they are typed, and `|g|` or `2 * x` is no markup. Doctests are left alone.
"""

import re
import textwrap

SECTIONS = {"Args:", "Attributes:", "Examples:", "Raises:", "Returns:", "Yields:"}
CODE = re.compile(r"`([^`]*)`")
MARKUP = re.compile(r"[*|\\]|_\b")
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+):", re.MULTILINE)
AS_TYPED = ".. code-block:: text"
INLINE = {"attribute", "data", "property"}


def escaped(text: str) -> str:
    """The text without characters that reStructuredText would interpret; code in backticks keeps them."""
    parts = CODE.split(text)  # text and code in turn
    return "".join(f"``{part}``" if i % 2 else MARKUP.sub(r"\\\g<0>", part) for i, part in enumerate(parts))


def converted(docstring: str) -> str:
    """The docstring, in reStructuredText, with the sections of Google's style left to napoleon."""
    out: list[str] = []
    section = ""  # within "Args:" and the like, indentation has a meaning of its own
    for paragraph in docstring.split("\n\n"):
        first = paragraph.strip("\n").split("\n")[0]
        if not first.startswith(" "):
            section = first if first in SECTIONS else ""
        if ">>>" in paragraph:
            out.append(paragraph)
        elif first.startswith("==="):
            out += [AS_TYPED, textwrap.indent(paragraph, "    ")]
        elif out and not section and first.startswith("    "):
            out += [AS_TYPED, paragraph]
        elif section == "Attributes:":  # "u, d: ..." would be a d of the type u
            out.append(escaped(SEVERAL.sub(lambda names: names[0].replace(", ", ","), paragraph)))
        else:
            out.append(escaped(paragraph))
    return "\n\n".join(out)


def process(app, what, name, obj, options, lines):
    """Called by autodoc for every docstring. An attribute's gets an empty comment, or napoleon reads types into it."""
    lines[:] = ["..", ""] * (what in INLINE) + converted("\n".join(lines)).split("\n")


def setup(app):
    """Before napoleon, which is called with priority 500."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True}
