"""Setting files: read with the position of every key and value, and the presets that ship with gradguard."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gradguard.core.errors import ConfigError
from gradguard.reporting.terminal.layout import clean, one_line, visible

KeyPath = tuple[str, ...]
logger = logging.getLogger("gradguard")

_LARGEST = 1 << 20  # bytes of a file
_DEEPEST = 20  # sections in sections
_MOST_NODES = 10_000  # keys and values, aliases written out
_CHECKOUT = (".git", ".hg", ".svn")
_PROJECT = ("pyproject.toml", "setup.cfg", "setup.py")
_told_foreign: set[Path] = set()

_PRESETS_PACKAGE = "gradguard.configs"
# In a checkout that is on sys.path without being installed, the presets stand beside the package.
_PRESETS_BESIDE = Path(__file__).resolve().parents[2] / "configs"
_OFF: dict[str, Any] = {
    "level": "off",
    "trace": {"mode": "never", "after_incident": 0, "contents": "none"},
    "actions": {"exceptions": "off", "silent": "off"},
}


class Place(NamedTuple):
    """A position in a source of settings; `line` and `column` are 1-based, as editors count."""

    source: str
    line: int | None = None
    column: int | None = None
    text: str | None = None
    """The whole line."""
    width: int = 1
    """How many characters are meant, from `column` on."""

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part is not None)


class Problem(NamedTuple):
    """One thing wrong in a source of settings."""

    place: Place
    message: str
    unknown_rule: bool = False

    def __str__(self) -> str:
        head = one_line(f"{self.place}: {self.message}")
        if self.place.text is None or self.place.line is None or self.place.column is None:
            return head
        number = f"{self.place.line:>4}"
        text = visible(self.place.text)
        # a tab before the carets stays a tab, so that they stand where the editor shows them
        before = "".join("\t" if char == "\t" else " " for char in self.place.text[: self.place.column - 1])
        carets = "^" * max(1, min(self.place.width, len(self.place.text) - self.place.column + 1))
        return f"{head}\n{number} | {text}\n{' ' * len(number)} | {before}{carets}"


class FileProblems(Exception):
    """A file that cannot be read as settings at all; carries what is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def deep_merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper` laid over `lower`, mappings key by key."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def shown(path: Path) -> str:
    """A path as a person would write it: relative where it lies below the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        FileProblems: unreadable, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise FileProblems([Problem(Place(shown(path)), "is larger than a megabyte, and no settings are")])
        return content.decode("utf-8-sig")
    except OSError as error:
        raise FileProblems([Problem(Place(shown(path)), f"cannot be read: {error.strerror or error}")]) from error
    except UnicodeDecodeError as error:
        raise FileProblems([Problem(Place(shown(path)), f"is not UTF-8 text (byte {error.start})")]) from error


class SettingsFile:
    """The settings one file states, and where it states them."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data
        self.project: Path | None = None
        """The folder that a file that was not named, but found, speaks for."""

    def locate(self, keys: KeyPath, *, at_key: bool) -> Place:
        """Where the key, or its value, stands; the nearest enclosing key that is found otherwise."""
        raise NotImplementedError


class _Loader(yaml.SafeLoader):
    """YAML without the surprise that `off`, `on`, `yes` and `no` are booleans: actions and levels are called `off`."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


class YamlFile(SettingsFile):
    """A YAML file of settings.

    Raises:
        FileProblems: not YAML, not a mapping, a key given twice.
    """

    def __init__(self, path: Path, text: str | None = None) -> None:
        self._lines = (text := read_text(path) if text is None else text).splitlines()
        try:
            if (problem := self._oversized(path, text)) is not None:
                raise FileProblems([problem])
            loader = _Loader(text)
            self._root = loader.get_single_node()
            super().__init__(path, {})
            if self._root is None:
                return
            problems = list(self._key_problems(self._root, set()))
            if not isinstance(self._root, yaml.MappingNode):
                problems.append(Problem(self._place(self._root), "settings are a mapping of `key: value` lines"))
            if problems:
                raise FileProblems(problems)
            self.data = loader.construct_document(self._root)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            said = " ".join(part for part in (error.context, error.problem) if part)
            place = Place(shown(path)) if mark is None else self._mark(shown(path), mark.line, mark.column)
            raise FileProblems([Problem(place, f"is not YAML: {said}")]) from error
        except (yaml.YAMLError, ValueError) as error:
            raise FileProblems([Problem(Place(shown(path)), f"is not YAML: {str(error).splitlines()[0]}")]) from error

    def _oversized(self, path: Path, text: str) -> Problem | None:
        """What is nested too deeply, or becomes too much when its aliases are written out; found without doing either."""
        sizes: dict[str, int] = {}
        open_: list[tuple[str | None, int]] = []  # the collections around an event: their anchor, and how many nodes came before them
        nodes = 0
        for event in yaml.parse(text, Loader=_Loader):
            message = ""
            anchor = getattr(event, "anchor", None)
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((anchor, nodes))
                nodes += 1
                if len(open_) > _DEEPEST:
                    message = f"is nested more than {_DEEPEST} deep, and no setting is"
            elif isinstance(event, yaml.CollectionEndEvent):
                name, before = open_.pop()
                if name is not None:
                    sizes[name] = nodes - before
            elif isinstance(event, yaml.AliasEvent):
                nodes += sizes.get(anchor or "", 1)
                if any(name == anchor for name, _ in open_):
                    message = f"`*{anchor}` stands inside of what it repeats"
            elif isinstance(event, yaml.ScalarEvent):
                nodes += 1
                if anchor is not None:
                    sizes[anchor] = 1
            if not message and nodes > _MOST_NODES:
                message = f"amounts to more than {_MOST_NODES} keys and values with its aliases written out"
            if message:
                mark = event.start_mark
                return Problem(Place(shown(path)) if mark is None else self._mark(shown(path), mark.line, mark.column), message)
        return None

    def locate(self, keys: KeyPath, *, at_key: bool) -> Place:
        found = node = self._root
        for depth, key in enumerate(keys):
            pair = self._child(node, key)
            if pair is None:
                break
            found, node = pair
            inline = isinstance(node, yaml.ScalarNode) or (isinstance(node, yaml.CollectionNode) and node.flow_style)
            if depth == len(keys) - 1 and not at_key and inline:
                found = node
        return Place(shown(self.path)) if found is None else self._place(found)

    @staticmethod
    def _child(node: yaml.Node | None, key: str) -> tuple[yaml.Node, yaml.Node] | None:
        if isinstance(node, yaml.MappingNode):
            for name, value in reversed(node.value):  # a merge key's pairs come first, the mapping's own override them
                if name.value == key:
                    return name, value
        if isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
            return node.value[int(key)], node.value[int(key)]
        return None

    def _key_problems(self, node: yaml.Node, seen: set[int]) -> Iterator[Problem]:
        if id(node) in seen:  # an alias, possibly of a node around it
            return
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for child in node.value:
                yield from self._key_problems(child, seen)
        if not isinstance(node, yaml.MappingNode):
            return
        first: dict[str, yaml.Node] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                yield Problem(self._place(name), "a key must be a word")
            elif name.tag == "tag:yaml.org,2002:str":
                if name.value in first:
                    line = first[name.value].start_mark.line + 1
                    yield Problem(self._place(name), f"`{name.value}` is given twice, first in line {line}; keep one of them")
                first.setdefault(name.value, name)
            elif name.tag != "tag:yaml.org,2002:merge":
                yield Problem(self._place(name), f"a key must be a word, and {name.value!r} is none; write it in quotes if it is meant")
            yield from self._key_problems(value, seen)

    def _place(self, node: yaml.Node) -> Place:
        start, end = node.start_mark, node.end_mark
        return self._mark(shown(self.path), start.line, start.column, end.column - start.column if end.line == start.line else 1)

    def _mark(self, source: str, line: int, column: int, width: int = 1) -> Place:
        text = self._lines[line] if line < len(self._lines) else None
        return Place(source, line + 1, column + 1, text, max(1, width))


class TomlFile(SettingsFile):
    """A TOML file of settings: its `[tool.gradguard]` table, or the whole file where `whole` is true and there is none.

    Positions are found by searching the text, since Python's TOML reader keeps none.

    Raises:
        FileProblems: not TOML, or the table is no table.
    """

    def __init__(self, path: Path, text: str | None = None, *, whole: bool = False) -> None:
        text = read_text(path) if text is None else text
        self._lines = text.splitlines()
        self.table: KeyPath = ("tool", "gradguard")
        try:
            document = _toml_loads(text)
        except RecursionError:
            raise FileProblems([Problem(Place(shown(path)), "is nested too deeply to be read, and no setting is")]) from None
        except ValueError as error:
            raise FileProblems([Problem(self._syntax_place(path, str(error)), f"is not TOML: {error}")]) from error
        tool = document.get("tool")
        data = tool.get("gradguard") if isinstance(tool, dict) else None
        self.stated = data is not None
        if data is None and whole:
            self.table, data = (), document
        super().__init__(path, data if isinstance(data, dict) else {})
        if data is not None and not isinstance(data, dict):
            raise FileProblems([Problem(self.locate((), at_key=True), "`tool.gradguard` must be a table")])

    def locate(self, keys: KeyPath, *, at_key: bool) -> Place:
        wanted = (*self.table, *keys)
        best, place = 0, Place(shown(self.path))
        header: KeyPath = ()
        for number, line in enumerate(self._lines):
            if match := re.match(r"\s*\[\[?\s*(?P<keys>[^\]]+?)\s*\]", line):
                header = stated = _toml_keys(match["keys"])
            elif match := re.match(r"\s*(?P<keys>(?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=\s*", line):
                stated = header + _toml_keys(match["keys"])
            else:
                continue
            depth = len(stated)
            if depth > best and wanted[:depth] == stated:
                start, end = match.span("keys")
                best, rest = depth, match.end()
                # what remains of the path can only stand in an inline table on this line
                for key in wanted[depth:]:
                    inner = re.compile(rf"(?<![\w-])[\"']?({re.escape(key)})[\"']?\s*=\s*").search(line, rest)
                    if inner is None:
                        break
                    best, (start, end), rest = best + 1, inner.span(1), inner.end()
                if not at_key and best == len(wanted) and depth > len(header):
                    start, end = rest, rest + len(re.split(r"\s*[,}#]", line[rest:], maxsplit=1)[0])
                place = Place(shown(self.path), number + 1, start + 1, line, max(1, end - start))
        return place

    def _syntax_place(self, path: Path, message: str) -> Place:
        match = re.search(r"line (\d+), column (\d+)", message)
        if match is None:  # "at end of document"
            return Place(shown(path), len(self._lines), len(self._lines[-1]) + 1) if self._lines else Place(shown(path))
        line, column = int(match[1]), int(match[2])
        return Place(shown(path), line, column, self._lines[line - 1] if line <= len(self._lines) else None)


def _toml_keys(dotted: str) -> KeyPath:
    return tuple(part[1] or part[2] or part[3] for part in re.finditer(r"([\w-]+)|\"([^\"]*)\"|'([^']*)'", dotted))


def _toml_loads(text: str) -> dict[str, Any]:
    # tomli is what became tomllib in Python 3.11, under its older name
    reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    document: dict[str, Any] = reader.loads(text)
    return document


def open_settings(path: Path) -> SettingsFile:
    """A settings file, by its extension: `.toml` is TOML, everything else YAML.

    Raises:
        FileProblems: it cannot be read.
    """
    return TomlFile(path, whole=path.name != "pyproject.toml") if path.suffix == ".toml" else YamlFile(path)


def nearest_project_files(start: str | os.PathLike[str] | None = None) -> tuple[TomlFile | None, YamlFile | None]:
    """The nearest pyproject.toml with a `[tool.gradguard]` table and the nearest gradguard.yaml of the project around `start`.

    A file that belongs to another user is not read, which is said once. A pyproject.toml that cannot be read is not reported
    unless it speaks of gradguard.

    Raises:
        FileProblems: a file that speaks of gradguard cannot be read.
    """
    toml: TomlFile | None = None
    yml: YamlFile | None = None
    problems: list[Problem] = []
    here = Path(start or Path.cwd()).resolve()
    project = project_root(here)
    for folder in (here, *here.parents):
        try:
            candidate = folder / "gradguard.yaml"
            if yml is None and candidate.is_file() and _may_decide(candidate):
                yml = YamlFile(candidate)
                yml.project = project
            candidate = folder / "pyproject.toml"
            if toml is None and candidate.is_file() and "gradguard" in (text := read_text(candidate)) and _may_decide(candidate):
                found = TomlFile(candidate, text)
                found.project = project
                toml = found if found.stated else None
        except FileProblems as error:
            problems += [problem for problem in error.problems if candidate.name != "pyproject.toml" or _speaks_of_gradguard(candidate)]
        except OSError:
            pass
        if folder == project:
            break
    if problems:
        raise FileProblems(problems)
    return toml, yml


def project_root(here: Path) -> Path:
    """Where the search for settings ends: the top of the checkout; else the outermost folder with a project file; else `here`."""
    folders = (here, *here.parents)
    checkout = next((folder for folder in folders if any((folder / name).exists() for name in _CHECKOUT)), None)
    if checkout is not None:
        return checkout
    marked = [folder for folder in folders if any(_is_ours(folder / name) for name in _PROJECT)]
    return marked[-1] if marked else here


def _speaks_of_gradguard(path: Path) -> bool:
    return b"gradguard" in path.read_bytes()[:_LARGEST]


def _may_decide(path: Path) -> bool:
    """Whether a file that was found counts; one of another user's does not: it could have been put there."""
    if _is_ours(path):
        return True
    if path not in _told_foreign:
        _told_foreign.add(path)
        logger.warning("%s belongs to another user and is not obeyed; name it (`config=`, `--config`) if it is meant", clean(str(path)))
    return False


def _is_ours(path: Path) -> bool:
    """Whether a file exists and belongs to this user or to root, the link to it as well."""
    if not hasattr(os, "geteuid"):  # Windows
        return path.exists()
    ours = {0, os.geteuid()}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        ours.add(int(os.environ["SUDO_UID"]))
    try:
        return path.stat().st_uid in ours and path.lstat().st_uid in ours
    except OSError:
        return False


def preset_text(level: str) -> str:
    """The preset file of a level, comments and all.

    Raises:
        ConfigError: the level has no file (`off`), or the installation lacks it.
    """
    for folder in (_installed_presets(), _PRESETS_BESIDE):
        if folder is not None and (file := folder / f"{level}.yaml").is_file():
            return str(file.read_text(encoding="utf-8"))
    raise ConfigError(f"there is no preset file for level {level!r}")


def _installed_presets() -> Any:
    try:
        return files(_PRESETS_PACKAGE)
    except (ImportError, TypeError):
        return None


@lru_cache(maxsize=8)
def preset_file(level: str) -> YamlFile:
    """The preset of a level, read; a level without a file (`off`) has a trivial one."""
    if level == "off":
        return YamlFile(Path("off.yaml"), yaml.safe_dump(_OFF))
    return YamlFile(Path(f"{level}.yaml"), preset_text(level))


def preset(level: str) -> dict[str, Any]:
    """What the preset of a level states."""
    return copy.deepcopy(preset_file(level).data)
