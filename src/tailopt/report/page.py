"""The page as one file: the data as JSON, script and style inside it, and a policy that lets nothing else run.

What a run folder holds (names, settings, reasons) is data. It reaches the page as JSON in which no character can end
the element that it is in, and the script makes text of it, never markup. The policy in the page's head allows the
script and the style by their digests alone: no other script runs, and nothing is requested.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any

from tailopt.report.contents import Contents, MetricOf, page_data

MOST_BYTES = 3_000_000
POINTS = (1000, 500, 250, 120, 60)  # of a series, at most: fewer where the page would grow too large
SCRIPTS = ("charts.js", "shapes.js", "sections.js", "page.js")
# In JSON these can only be in texts, so that escaping them changes no value.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def report_page(contents: Contents, title: str, metric_of: MetricOf, made: str, generator: str) -> str:
    """Return the page.

    Args:
        metric_of: run -> its main metric, and whether lower is better.
        made: when, for the reader.
        generator: the program and its version.
    """
    for points in POINTS:
        page = render(page_data(contents, metric_of, made, points), title, generator)
        if len(page.encode()) <= MOST_BYTES:
            break
    return page


def render(data: Mapping[str, Any], title: str, generator: str) -> str:
    """Put data, script and style into one page.

    Examples:
        >>> page = render({"runs": ["</script><script>alert(1)</script>"]}, "<b>", "tailopt")
        >>> "alert(1)</script>" in page, "\\\\u003c/script\\\\u003e" in page, "<title>&lt;b&gt;</title>" in page
        (False, True, True)
    """
    script, style = "\n".join(map(_asset, SCRIPTS)), _asset("page.css")
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        generator=html.escape(generator),
        data=json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).translate(_ESCAPES),
        script=script,
        style=style,
        script_source=_source(script),
        style_source=_source(style),
    )


def _asset(name: str) -> str:
    return (resources.files("tailopt.report") / "assets" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """Return the digest by which a policy allows an element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
