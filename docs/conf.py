"""How Sphinx builds the guide: `make docs`. The build needs no network, and no page loads anything from elsewhere."""

import os
import sys
from pathlib import Path

import tailopt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

project = "tailopt"
author = "The tailopt developers"
version = release = tailopt.__version__
smartquotes_action = "D"  # dashes, but no curled quotation marks: u="auto" is code, also without backticks

extensions = [
    "myst_nb",  # pages in Markdown, and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_design",  # the cards of the start page and of the gallery
    "formulas",  # LaTeX as MathML
    "plain_docstrings",  # docstrings are plain text, not reStructuredText
    "published_names",  # torch.nn.Module rather than torch.nn.modules.module.Module
]
exclude_patterns = ["_extensions", "_jupyter", "_templates"]
templates_path = ["_templates"]

# Markdown. Headings get anchors as on GitHub, so that links to them work there too.
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

# Notebooks are kept without outputs, and run while the guide is built: what a page shows is what the code printed.
# Their kernel is that of the environment, without ipykernel's warning that it talks over a local TCP port.
os.environ["JUPYTER_PATH"] = str(HERE / "_jupyter")
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

# The reference. A link that leads nowhere is an error: `make docs` calls sphinx-build with -n -W.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_param = False  # one entry for "maximize, foreach, fused: as in torch"
napoleon_use_rtype = False
napoleon_use_ivar = True

# Types in signatures that have no page: what is not public here, and packages that few readers have.
nitpick_ignore_regex = [
    ("py:class", r"tailopt\.[a-z_]+\..+"),
    ("py:class", r"(accelerate|flwr|lightning|transformers)\..+|DataFrame|Series"),
    ("py:exc", "Disagreement|NodeLost"),
]

# Links to names of Python and torch. The inventories list the names that the guide uses; `python docs/inventories.py`
# compares them with the published ones, and is the only thing here that needs a network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.inv"),
}

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "tailopt"
html_static_path = ["_static"]
html_css_files = ["guide.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"**": ["whole-guide"]}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_theme_options = {
    "logo": {"text": "tailopt"},
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
copyright = "The tailopt developers, Apache-2.0"
