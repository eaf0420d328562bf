"""The HTML report of a process: one self-contained page, written anew with each diagnosis."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import ConfigError
from gradguard.core.ranks import own_suffix
from gradguard.reporting.html.page import MARK, assemble, render_section
from gradguard.reporting.jsonl import refuse_other_files, replace_file

_FIRST = re.compile(rb"<!DOCTYPE html>\s*" + MARK.encode())
_MOST = 50  # diagnoses on a page; the first ones, which are mostly what the others come from
_pages: dict[Path, _Page] = {}  # of this process: guards made in a loop write on the same page


class _Page:
    """What stands on a page so far."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.diagnoses: list[Diagnosis] = []
        self.sections: list[str] = []
        self.left_out = 0


def check_page(path: Path) -> None:
    """Lets a page of ours pass, and a file that is missing or empty.

    Raises:
        ConfigError: the file holds something else, or pages cannot be made here.
    """
    if find_spec("jinja2") is None:
        raise ConfigError("the HTML report needs jinja2: pip install 'gradguard[report]'")
    refuse_other_files(path, _FIRST)


class HtmlReport:
    """Writes diagnoses on a page.

    The page is written with the first diagnosis and replaced with each further one, whole or not at all, so that what a browser loads is
    never half a page and nothing is lost when the process is killed. Ranks other than the first, and spawned workers, write pages of
    their own beside it (`page.rank1.html`).

    Args:
        path: the page.

    Raises:
        ConfigError: the file holds something else, or jinja2, which pages are made with, is not installed.
        OSError (from `write`): the page cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # a program that changes its working directory keeps its page
        if self.path not in _pages:
            check_page(self.path)

    def begin(self) -> None:
        """Puts an empty page in the place of an earlier run's.

        Raises:
            OSError: it cannot be written.
        """
        _pages.pop(self.path, None)
        self._put(_Page())

    def write(self, diagnosis: Diagnosis) -> None:
        """Adds a diagnosis to the page."""
        page = _pages.setdefault(self.path, _Page())
        with page.lock:
            if len(page.sections) >= _MOST:
                page.left_out += 1
            else:
                self._add(page, diagnosis)
            self._put(page)

    def revise(self, old: Diagnosis, new: Diagnosis) -> None:
        """Shows a diagnosis anew in its place: more is known of it by now. Adds it where it is not there."""
        page = _pages.setdefault(self.path, _Page())
        with page.lock:
            at = next((i for i, each in enumerate(page.diagnoses) if each is old or each.key == old.key), None)
            self._add(page, new, at)
            self._put(page)

    def _add(self, page: _Page, diagnosis: Diagnosis, at: int | None = None) -> None:
        if at is None:
            page.diagnoses.append(diagnosis)
            page.sections.append(render_section(diagnosis, len(page.diagnoses)))
        else:
            page.diagnoses[at] = diagnosis
            page.sections[at] = render_section(diagnosis, at + 1)

    def _put(self, page: _Page) -> None:
        suffix = own_suffix()
        path = self.path.with_name(f"{self.path.stem}{suffix}{self.path.suffix}") if suffix else self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_other_files(path, _FIRST)
        text = assemble(page.diagnoses, page.sections, "gradguard report", page.left_out)
        replace_file(path, text.encode("utf-8", "replace"))
