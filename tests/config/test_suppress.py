"""`# gradguard: ignore` comments and `gradguard.ignore(...)` regions, on real files."""

from __future__ import annotations

import importlib.util
import textwrap
import threading
from pathlib import Path
from types import ModuleType

import pytest
from settings_helpers import diagnosis

from gradguard.config.suppressions import IgnoreComment, IgnoreRegion, Suppressions, ignore
from gradguard.core.diagnosis import Diagnosis, SourceSpan
from gradguard.core.errors import UnknownRuleError


def script(tmp_path: Path, text: str, name: str = "train.py") -> str:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return str(path)


def at(file: str, line: int, code: str = "GG604", name: str = "optimizer-orphaned-parameters") -> Diagnosis:
    return diagnosis(code, name, file=file, line=line)


def span(file: str, line: int) -> SourceSpan:
    return SourceSpan(file=file, line=line, end_line=line)


@pytest.mark.parametrize(
    ("comment", "silenced"),
    [
        ("# gradguard: ignore[GG604]", True),
        ("# gradguard: ignore[gg604]", True),
        ("# gradguard: ignore[GG6]", True),
        ("# gradguard: ignore[optimizer-orphaned-parameters]", True),
        ("# gradguard: ignore[GG601, GG604]", True),
        ("# gradguard: ignore[ GG9 ,GG604 ]", True),
        ("# gradguard: ignore", True),
        ("# gradguard:ignore", True),
        ("#gradguard: ignore", True),
        ("# noqa: E501  # gradguard: ignore[GG604]", True),
        ("# gradguard: ignore[GG604] - the probe owns it", True),
        ("# gradguard: ignore[GG601]", False),
        ("# gradguard: ignore[GG9]", False),
        ("# gradguard: ignore[GG]", False),
        ("# gradguard: ignore[GG604", False),
        ("# gradguard: ignore[]", False),
        ("# gradguard: ignored", False),
        ("# gradguard ignore", False),
        ("", False),
    ],
)
def test_what_a_comment_means(comment: str, silenced: bool, tmp_path: Path) -> None:
    file = script(tmp_path, f"x = 1\noptimizer.step()  {comment}\n")
    assert (Suppressions().is_suppressed(at(file, 2)) is not None) is silenced
    assert Suppressions().is_suppressed(at(file, 1)) is None


def test_the_match_tells_the_comment(tmp_path: Path) -> None:
    file = script(tmp_path, "step()  # why: see above  # gradguard: ignore[GG604]\n")
    found = Suppressions().is_suppressed(at(file, 1))
    assert isinstance(found, IgnoreComment)
    assert (found.file, found.line, found.text, found.selectors, found.used) == (file, 1, "# gradguard: ignore[GG604]", ("GG604",), 1)


STATEMENTS = """
    loss = criterion(
        model(x),
        y,  # gradguard: ignore[GG604]
    )
    loss.backward()
    for x, y in zip(
        loader,  # gradguard: ignore[GG604]
        targets,
    ):
        loss.backward()
    text = '''
    # gradguard: ignore[GG604]
    '''
    other = "# gradguard: ignore[GG604]"; step()
    # gradguard: ignore[GG604]
    step()
    value = f(
        # gradguard: ignore[GG604]
        1
    )
    if x: step()  # gradguard: ignore[GG604]
    last = \\
        step()  # gradguard: ignore[GG604]
"""


def test_any_line_of_the_statement_counts_and_no_other(tmp_path: Path) -> None:
    file = script(tmp_path, STATEMENTS)
    lines = Path(file).read_text().splitlines()
    suppressions = Suppressions()
    silenced = [number for number in range(1, len(lines) + 1) if suppressions.is_suppressed(at(file, number))]
    # 15 is the comment's own line: a comment that stands alone belongs to no statement
    assert silenced == [1, 2, 3, 4, 6, 7, 8, 9, 15, 17, 18, 19, 20, 21, 22, 23]


def test_the_call_line_counts_as_well_as_the_culprit(tmp_path: Path) -> None:
    model = script(tmp_path, "self.scale.add_(1)\n", "model.py")
    train = script(tmp_path, "loss.backward()  # gradguard: ignore[GG604]\nloss.backward()\n")
    suppressions = Suppressions()
    assert suppressions.is_suppressed(at(model, 1), span(train, 1))
    assert suppressions.is_suppressed(at(model, 1), span(train, 2)) is None
    assert suppressions.is_suppressed(at(model, 1)) is None
    nowhere = at(model, 1).model_copy(update={"culprit": None})
    assert suppressions.is_suppressed(nowhere, span(train, 1))
    assert suppressions.is_suppressed(nowhere) is None


def test_comments_that_silenced_nothing(tmp_path: Path) -> None:
    text = """
        a()  # gradguard: ignore[GG604]
        b()  # gradguard: ignore[GG601]
        c = "# gradguard: ignore"
        d()  # gradguard: ignore
        """
    file, other = script(tmp_path, text), script(tmp_path, "e()  # gradguard: ignore\n", "other.py")
    suppressions = Suppressions()
    for _ in range(3):
        assert suppressions.is_suppressed(at(file, 1))
    assert suppressions.unused({file: {1, 2, 3, 4}}) == [(file, 2, "# gradguard: ignore[GG601]"), (file, 4, "# gradguard: ignore")]
    assert suppressions.unused({file: {1, 2}, other: {1}})[-1] == (other, 1, "# gradguard: ignore")
    assert suppressions.unused({file: {1, 3}}) == []  # what did not run had nothing to silence
    assert [(comment.line, comment.used) for comment in suppressions.used()] == [(1, 3)]


def test_comments_that_cannot_mean_what_was_meant(tmp_path: Path) -> None:
    text = """
        a()  # gradguard: ignore[GG694, stale-gradient]
        b()  # gradguard: ignroe[GG604]
        c()  # gradguard: ignore[]
        d()  # gradguard: ignore[GG604
        e()  # gradguard: see the docs
        f()  # gradguard: ignore[GG604]
        """
    file = script(tmp_path, text)
    problems = Suppressions().problems([file])
    assert [(problem.line, problem.message) for problem in problems] == [
        (1, "unknown rule 'GG694'; did you mean GG604 or GG612 or GG601?"),
        (1, "unknown rule 'stale-gradient'; did you mean stale-gradients?"),
        (2, "`# gradguard: ignroe` is not understood; did you mean `# gradguard: ignore`?"),
        (3, "`# gradguard: ignore[]` names no rule; name one, or leave the brackets out to ignore every rule"),
        (4, "the bracket of `# gradguard: ignore[` is not closed"),
    ]


def test_files_that_are_missing_or_no_python(tmp_path: Path) -> None:
    assert Suppressions().is_suppressed(at(str(tmp_path / "gone.py"), 1)) is None
    file = script(tmp_path, "a()  # gradguard: ignore\nx = (\n")
    assert Suppressions().is_suppressed(at(file, 1)), "what stands before the error is read"
    assert Suppressions().is_suppressed(at("<stdin>", 1)) is None


# -- regions ----------------------------------------------------------------------------------------------------------


def silent(code: str = "GG604", name: str = "optimizer-orphaned-parameters") -> bool:
    return Suppressions().is_suppressed(diagnosis(code, name, file="nowhere.py")) is not None


def test_a_region_holds_inside_and_ends() -> None:
    assert not silent()
    with ignore("GG604", "stale-gradients"):
        assert silent() and silent("GG601", "stale-gradients")
        assert not silent("GG901", "lonely-rule")
        with ignore():
            assert silent("GG901", "lonely-rule")
        assert silent() and not silent("GG901", "lonely-rule")
    assert not silent()
    with pytest.raises(ZeroDivisionError), ignore("GG6"):
        raise ZeroDivisionError
    assert not silent()


def test_a_region_is_reusable_nestable_and_decorates() -> None:
    region = ignore("GG6")
    with region, region:
        assert silent()
    with region:
        assert silent()

    @ignore("GG6")
    def inner(depth: int) -> bool:
        return silent() and (depth == 0 or inner(depth - 1)) and silent()

    assert inner(2)
    assert not silent()


def test_a_region_is_of_its_own_thread() -> None:
    heard: list[bool] = []
    with ignore("GG604"):
        thread = threading.Thread(target=lambda: heard.append(silent()))
        thread.start()
        thread.join()
        assert silent()
    assert heard == [False]


def test_regions_of_generators_may_end_out_of_order() -> None:
    def steps(rule: str):  # type: ignore[no-untyped-def]
        with ignore(rule):
            yield
            yield

    first, second = steps("GG601"), steps("GG604")
    next(first), next(second)
    first.close()
    assert silent() and not silent("GG601", "stale-gradients")
    second.close()
    assert not silent()


def test_a_region_names_itself_and_checks_its_rules() -> None:
    with ignore("GG604"):
        found = Suppressions().is_suppressed(at("x.py", 1))
        assert isinstance(found, IgnoreRegion) and found.text == "gradguard.ignore('GG604')"
    with pytest.raises(UnknownRuleError, match="did you mean stale-gradients"):
        ignore("stale-gradient")


def load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("region_script", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_culprit_inside_a_regions_lines_is_silenced_after_the_region_was_left(tmp_path: Path) -> None:
    text = """
        from gradguard.config.suppressions import ignore

        a = 1
        with ignore("GG604"):
            b = 1
            c = 1
        d = 1

        @ignore("GG604")
        def decorated():
            return 1

        def never_entered():
            with ignore("GG604"):
                return 1

        def by_hand():
            region = ignore("GG604")
            region.__enter__()
            e = 1
            region.__exit__(None, None, None)

        by_hand()
        """
    file = script(tmp_path, text)
    load(file)
    suppressions = Suppressions()
    silenced = [line for line in range(1, 24) if suppressions.is_suppressed(at(file, line))]
    assert silenced == [4, 5, 6, 9, 10, 11]
    assert not suppressions.is_suppressed(at(file, 5, "GG601", "stale-gradients"))
