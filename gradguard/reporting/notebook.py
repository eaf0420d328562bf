"""The diagnosis in a notebook: HTML where the front end shows it, the terminal's text everywhere else."""

from __future__ import annotations

import html
import sys
from importlib import import_module

from gradguard.core.diagnosis import Diagnosis
from gradguard.reporting.terminal.render import print_diagnosis, render


def to_html_fragment(diagnosis: Diagnosis) -> str:
    """What a `_repr_html_` returns: a styled fragment, or without jinja2 the plain text in a `<pre>`."""
    from gradguard.reporting.html.page import render_fragment

    try:
        return render_fragment(diagnosis)
    except ImportError:
        return f"<pre>{html.escape(render(diagnosis, unicode=True))}</pre>"


def in_notebook() -> bool:
    """Whether an IPython kernel runs this code (not the IPython prompt of a terminal)."""
    ipython = sys.modules.get("IPython")  # who runs in a kernel has it imported
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def display(diagnosis: Diagnosis) -> None:
    """Show the diagnosis below the running cell, or print it to stderr where no kernel runs."""
    if not in_notebook():
        print_diagnosis(diagnosis)
        return
    import_module("IPython.display").display({"text/html": to_html_fragment(diagnosis), "text/plain": render(diagnosis)}, raw=True)
