"""Formulas as MathML, which browsers draw themselves: no script and no font is loaded.

The conversion is that of docutils, which Sphinx builds on. MathJax, Sphinx's default, comes from a CDN.
"""

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)


def write_mathml(writer, node, block):
    """Write the formula; a command of LaTeX that docutils does not know is a warning, which `make docs` refuses."""
    try:
        writer.body.append(latex2mathml.tex2mathml(node.astext(), as_block=block))
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
    raise nodes.SkipNode


def setup(app):
    """Make this the way in which Sphinx draws formulas."""
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(lambda writer, node: write_mathml(writer, node, block=False), None),
        block_renderers=(lambda writer, node: write_mathml(writer, node, block=True), None),
    )
    return {"parallel_read_safe": True}
