"""Silencing a rule at one place: `# gradguard: ignore[GG604]` on a line, `gradguard.ignore("GG604")` around a region.

A comment counts on any line of the statement (of a compound statement: of its head) that holds the culprit or the call.
Only real comments count; the same words inside a string do not.
"""

from __future__ import annotations

import ast
import difflib
import io
import linecache
import re
import sys
import threading
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gradguard.core.errors import UnknownRuleError

if TYPE_CHECKING:
    from types import TracebackType

    from gradguard.core.diagnosis import Diagnosis, SourceSpan

_DIRECTIVE = re.compile(r"#\s*gradguard\s*:\s*(?P<word>[\w-]*)\s*(?:\[(?P<rules>[^\]#]*)(?P<closed>\])?)?", re.IGNORECASE)
_SHORTEST_FAMILY = len("GG1")
F = TypeVar("F", bound=Callable[..., Any])


class CommentProblem(NamedTuple):
    """An ignore comment that cannot mean what was meant."""

    file: str
    line: int
    message: str


@dataclass
class IgnoreComment:
    """One `# gradguard: ignore` comment; `first` to `last` are the lines of its statement."""

    file: str
    line: int
    text: str
    selectors: tuple[str, ...]
    """Codes, names or family prefixes as written; empty: every rule."""
    first: int
    last: int
    used: int = 0
    """How many diagnoses it silenced."""


@dataclass(frozen=True)
class IgnoreRegion:
    """A region that was entered with `gradguard.ignore(...)`."""

    selectors: tuple[str, ...]

    @property
    def text(self) -> str:
        """The call that opened it, as a person would write it."""
        return f"gradguard.ignore({', '.join(repr(selector) for selector in self.selectors)})"


class _Open(threading.local):
    def __init__(self) -> None:
        self.regions: list[IgnoreRegion] = []


_OPEN = _Open()
# file -> line of the `with` or of the decorated function -> region. Some bugs show only after the region was left (a gradient
# that no step consumed): then it counts whether the culprit stands inside the region's text.
_ENTERED: dict[str, dict[int, IgnoreRegion]] = {}
_MOST_FILES = 1000


class ignore(ContextDecorator):
    """Silences rules in a region of code or in a function: `with gradguard.ignore("GG604"):`, `@gradguard.ignore("GG6")`.

    It holds on this thread for as long as the region runs, and for culprits that stand in the region's lines for good.

    Args:
        *selectors: codes, names or family prefixes; none means every rule.

    Raises:
        UnknownRuleError: a selector that means nothing, with the nearest right one.
    """

    def __init__(self, *selectors: str) -> None:
        for selector in selectors:
            _check(selector)
        self._region = IgnoreRegion(selectors)

    def __call__(self, func: F) -> F:
        code = getattr(func, "__code__", None)
        if code is not None:
            self._remember(code.co_filename, code.co_firstlineno)
        return super().__call__(func)

    def __enter__(self) -> ignore:
        frame = sys._getframe(1)
        self._remember(frame.f_code.co_filename, frame.f_lineno)
        _OPEN.regions.append(self._region)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A generator may leave its region after one that was entered later, so the entry itself is looked for.
        regions = _OPEN.regions
        for index in range(len(regions) - 1, -1, -1):
            if regions[index] is self._region:
                del regions[index]
                return

    def _remember(self, file: str, line: int) -> None:
        lines = _ENTERED.get(file)
        if lines is None:
            if len(_ENTERED) >= _MOST_FILES:  # generated code in endless new "files" must not grow the record
                _ENTERED.clear()
            lines = _ENTERED[file] = {}
        lines[line] = self._region


class Suppressions:
    """The ignore comments of the files one guard has met, and what they silenced."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[list[IgnoreComment], list[CommentProblem]]] = {}
        self._blocks: dict[str, list[_Block]] = {}

    def is_suppressed(self, diagnosis: Diagnosis, call_line: SourceSpan | None = None) -> IgnoreComment | IgnoreRegion | None:
        """What silences the diagnosis: an open region, or a comment at the culprit or at the call; None if nothing does."""
        for region in reversed(_OPEN.regions):
            if _means(region.selectors, diagnosis):
                return region
        for span in (diagnosis.culprit, call_line):
            if span is None:
                continue
            if (around := self._region_around(span, diagnosis)) is not None:
                return around
            for comment in self._read(span.file)[0]:
                if comment.first <= span.line <= comment.last and _means(comment.selectors, diagnosis):
                    comment.used += 1
                    return comment
        return None

    def unused(self, ran: Mapping[str, AbstractSet[int]]) -> list[tuple[str, int, str]]:
        """(file, line, text) of every comment that silenced nothing, though a line of its statement ran.

        Args:
            ran: the lines that are known to have run, by file.
        """
        found = [
            comment
            for file, lines in ran.items()
            for comment in self._read(file)[0]
            if not comment.used and not lines.isdisjoint(range(comment.first, comment.last + 1))
        ]
        return [(comment.file, comment.line, comment.text) for comment in found]

    def used(self) -> list[IgnoreComment]:
        """Every comment that silenced something, with how often."""
        return [comment for comments, _ in self._files.values() for comment in comments if comment.used]

    def problems(self, files: Iterable[str] = ()) -> list[CommentProblem]:
        """Comments that name a rule that does not exist or are misspelt, in `files` and in those met so far."""
        return [problem for file in self._all(files) for problem in self._read(file)[1]]

    def _region_around(self, span: SourceSpan, diagnosis: Diagnosis) -> IgnoreRegion | None:
        for entered, region in list(_ENTERED.get(span.file, {}).items()):
            if _means(region.selectors, diagnosis):
                if span.file not in self._blocks:
                    self._blocks[span.file] = _blocks(span.file)
                block = next((block for block in self._blocks[span.file] if entered in block.head), None)
                if block is not None and span.line in block.lines:
                    return region
        return None

    def _all(self, files: Iterable[str]) -> list[str]:
        return list(dict.fromkeys([*self._files, *files]))

    def _read(self, file: str) -> tuple[list[IgnoreComment], list[CommentProblem]]:
        if file not in self._files:
            self._files[file] = read_comments(file)
        return self._files[file]


def read_comments(file: str) -> tuple[list[IgnoreComment], list[CommentProblem]]:
    """The ignore comments of a file (or of a notebook's cell), and what is wrong with them."""
    text = "".join(linecache.getlines(file))
    if "gradguard" not in text:  # most files: spares tokenizing them
        return [], []
    comments: list[IgnoreComment] = []
    problems: list[CommentProblem] = []
    for line, comment, first, last in _comments(text):
        for match in _DIRECTIVE.finditer(comment):
            directive = comment[match.start() : match.end()].strip()
            selectors, wrong = _parse(match)
            problems += [CommentProblem(file, line, message) for message in wrong]
            if selectors is not None:
                comments.append(IgnoreComment(file, line, directive, selectors, first, last))
    return comments, problems


def _parse(match: re.Match[str]) -> tuple[tuple[str, ...] | None, list[str]]:
    word = match["word"].lower()
    if word != "ignore":
        near = difflib.get_close_matches(word, ["ignore"], cutoff=0.5)
        # "# gradguard: see the docs" is prose; only what looks like a misspelt directive is worth a word
        misspelt = near or match["rules"] is not None
        return None, [f"`# gradguard: {match['word']}` is not understood; did you mean `# gradguard: ignore`?"] if misspelt else []
    if match["rules"] is None:
        return (), []
    selectors = tuple(selector.strip() for selector in match["rules"].split(",") if selector.strip())
    if not match["closed"]:
        return None, ["the bracket of `# gradguard: ignore[` is not closed"]
    if not selectors:
        return None, ["`# gradguard: ignore[]` names no rule; name one, or leave the brackets out to ignore every rule"]
    wrong = []
    for selector in selectors:
        try:
            _check(selector)
        except UnknownRuleError as error:
            wrong.append(str(error))
    return selectors, wrong


def _comments(text: str) -> Iterator[tuple[int, str, int, int]]:
    """(line, comment, first line, last line of the statement it belongs to); a comment on its own belongs to none."""
    first = 0
    waiting: list[tuple[int, str]] = []
    reader = io.StringIO(text).readline
    tokens = tokenize.generate_tokens(reader)
    while True:
        try:
            token = next(tokens)
        except (StopIteration, tokenize.TokenError, SyntaxError):
            # the end, or text that is no Python: what stands before it has been seen
            yield from ((line, comment, first or line, line) for line, comment in waiting)
            return
        if token.type == tokenize.COMMENT:
            waiting.append((token.start[0], token.string))
        elif token.type == tokenize.NEWLINE or (token.type == tokenize.NL and not first):
            yield from ((line, comment, first or line, token.end[0]) for line, comment in waiting)
            first, waiting = 0, []
        elif not first and token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING):
            first = token.start[0]


class _Block(NamedTuple):
    head: range
    lines: range


def _blocks(file: str) -> list[_Block]:
    """The lines of every `with` and every function of a file, the smallest first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith, ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = [] if isinstance(node, (ast.With, ast.AsyncWith)) else node.decorator_list
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            head = range(first, max(first + 1, node.body[0].lineno))
            found.append(_Block(head, range(first, (node.end_lineno or node.lineno) + 1)))
    return sorted(found, key=lambda block: len(block.lines))


def _means(selectors: tuple[str, ...], diagnosis: Diagnosis) -> bool:
    if not selectors:
        return True
    for selector in selectors:
        wanted = selector.strip()
        if wanted.lower() == diagnosis.name or wanted.upper() == diagnosis.code:
            return True
        if len(wanted) >= _SHORTEST_FAMILY and diagnosis.code.startswith(wanted.upper()):
            return True
    return False


def _check(selector: str) -> None:
    # by name at run time: nothing else of this file needs the rules, and their import is not free
    from gradguard.rules.registry import find_rules

    find_rules(selector)
