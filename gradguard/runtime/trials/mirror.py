"""A copy of a program's files to run a trial on: sources and small files are copied, the rest is linked where the kernel keeps a
trial's process from writing through a link, and left out where it does not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from gradguard.core.foreign_exceptions import internal_error

_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_SMALL = 1 << 20
_MOST_BYTES = 64 << 20
_MOST_FILES = 5_000
_CROWDED = 1_000  # entries of a folder that is data
_ASIDE = {"__pycache__", "node_modules"}


class Mirror:
    """Copies of folders, below one folder.

    Args:
        folder: where to; its real path.
        roots: what to copy, by their real paths; none is below another.
        link: whether what is not copied is linked.
    """

    def __init__(self, folder: str, roots: list[str], link: bool) -> None:
        self._folder = folder
        self._link = link
        self._bytes = self._files = 0
        self.left_out: list[str] = []
        self.places = {root: os.path.join(folder, str(i), os.path.basename(root) or "root") for i, root in enumerate(roots)}
        for root, place in self.places.items():
            self._copy(root, place)

    def place_of(self, path: str) -> str | None:
        """Where a file or folder stands in the copy."""
        path = os.path.realpath(path)
        for root, place in self.places.items():
            if path == root or path.startswith(os.path.join(root, "")):
                return place + path[len(root) :]
        return None

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Gives files of the copy other contents, by their original paths.

        Raises:
            LookupError: one that is not in the copy.
        """
        for path, content in contents.items():
            place = self.place_of(path)
            if place is None:
                raise LookupError(f"{path} is outside of the program's folder")
            unlinked(self._folder, os.path.dirname(place))
            if not os.path.isfile(place):
                raise LookupError(f"{path} could not be copied: the program's folder is too large")
            if os.path.islink(place):
                os.unlink(place)
            Path(place).write_bytes(content)

    def _copy(self, source: str, target: str) -> None:
        os.makedirs(target)
        try:
            entries = sorted(os.scandir(source), key=lambda entry: entry.name)
        except internal_error(OSError):
            return
        for entry in entries:
            place = os.path.join(target, entry.name)
            try:
                if entry.is_dir(follow_symlinks=False):
                    self._copy_folder(entry, place)
                else:
                    self._copy_file(entry, place)
            except internal_error(OSError):
                self.left_out.append(entry.path)

    def _copy_folder(self, entry: os.DirEntry[str], place: str) -> None:
        if entry.name in _ASIDE or entry.path == self._folder:
            return
        aside = entry.name.startswith(".") or os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
        if aside or self._files >= _MOST_FILES or _is_data(entry.path):
            self._link_to(entry.path, place)
        else:
            self._copy(entry.path, place)

    def _copy_file(self, entry: os.DirEntry[str], place: str) -> None:
        if not entry.is_file():  # a socket, a link to nowhere or to a folder
            if os.path.isdir(entry.path):
                self._link_to(entry.path, place)
            return
        size = entry.stat().st_size
        fits = size <= _SMALL and self._bytes + size <= _MOST_BYTES and self._files < _MOST_FILES
        if entry.name.endswith(".py") or fits:
            self._bytes += size
            self._files += 1
            shutil.copy2(entry.path, place)
        else:
            self._link_to(entry.path, place)

    def _link_to(self, path: str, place: str) -> None:
        if self._link:
            os.symlink(path, place)
        else:
            self.left_out.append(path)


def unlinked(top: str, folder: str) -> None:
    """Puts folders of links in the place of linked folders on the way down, so that what is changed there is changed in the copy alone."""
    current = top
    for part in os.path.relpath(folder, top).split(os.sep):
        current = os.path.join(current, part)
        if os.path.islink(current) and os.path.isdir(current):
            real = os.path.realpath(current)
            os.unlink(current)
            os.mkdir(current)
            for entry in os.listdir(real):
                os.symlink(os.path.join(real, entry), os.path.join(current, entry))


def _is_data(folder: str) -> bool:
    """Whether a folder has very many files and none of Python's."""
    names = os.listdir(folder)
    return len(names) > _CROWDED and not any(name.endswith(".py") for name in names)


def roots_of(script_folder: str, working_folder: str) -> list[str]:
    """The folders that a program consists of: its project, and the working directory where that is elsewhere."""
    script_folder, working_folder = os.path.realpath(script_folder), os.path.realpath(working_folder)
    root = project_of(script_folder)
    if root == script_folder and _is_below(script_folder, working_folder) and not _is_too_high(working_folder):
        root = working_folder
    if _is_below(working_folder, root):
        return [root]
    if _is_below(root, working_folder):
        return [root] if _is_too_high(working_folder) else [working_folder]
    return [root, working_folder]


def project_of(folder: str) -> str:
    """The nearest folder upwards that looks like a project's top; the folder itself where there is none."""
    current = os.path.realpath(folder)
    here = current
    while not _is_too_high(current):
        if any(os.path.exists(os.path.join(current, mark)) for mark in _MARKS):
            return current
        current = os.path.dirname(current)
    return here


def _is_too_high(folder: str) -> bool:
    return folder == os.path.dirname(folder) or folder == os.path.realpath(os.path.expanduser("~"))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))
