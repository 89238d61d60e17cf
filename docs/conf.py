"""The site: ``make docs`` builds it from these pages, the docstrings, the command line and the config.

Everything that a page needs at reading time comes with it: no script, font or style sheet is fetched.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_extensions"), str(ROOT / "src"), str(ROOT)]
# A dash in --help and in messages, and no bars, wherever the site is built.
os.environ |= {"HF_HUB_OFFLINE": "1", "TERM": "dumb", "COLUMNS": "100"}

import ringspan  # noqa: E402

project = "ringspan"
author = "ringspan contributors"
project_copyright = "ringspan contributors, Apache-2.0"
version = release = ringspan.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "repository",
    "mathml",
    "reference",
    "explorer",
    "accessible",
    "results",
]
exclude_patterns = ["_extensions", "_static"]
source_suffix = {".md": "markdown"}
root_doc = "index"
highlight_language = "text"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4  # as GitHub makes them, so that links to headings work on both
# a page may begin below the first level, as on GitHub
suppress_warnings = ["myst.header"]

autodoc_typehints = (
    "none"  # signatures would not fit a phone; what an argument is, its docstring says
)
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
add_module_names = False
smartquotes = False  # would make dashes of options
python_display_short_literal_types = True

html_theme = "furo"
html_title = "ringspan"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b5cad",
        "color-brand-content": "#0b5cad",
    },
    "dark_css_variables": {
        "color-brand-primary": "#79b8ff",
        "color-brand-content": "#79b8ff",
    },
    "navigation_with_keys": True,
}
copybutton_exclude = ".linenos, .gp, .go"
