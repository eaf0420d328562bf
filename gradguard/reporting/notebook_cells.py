"""Notebook cells: code typed into IPython or a notebook has a file of its own that nobody has ever seen."""

from __future__ import annotations

import sys

from gradguard.core.foreign_exceptions import internal_error


def cell_name(file: str) -> str | None:
    """`Cell In[4]`, as IPython's own tracebacks call it; None for files that are no cells.

    Source: `IPython.core.compilerop.CachingCompiler.format_code_name` (IPython 8 and later).
    """
    ipython = sys.modules.get("IPython")  # who types into a cell has it imported
    try:
        shell = ipython.get_ipython() if ipython is not None else None
        label, name = (None, None) if shell is None else shell.compile.format_code_name(file) or (None, None)
    except internal_error():  # an older IPython, or a shell that compiles in another way
        return None
    return f"{label} {name}" if label == "Cell" else None
