"""gradguard for pytest: `pytest --gradguard=strict`, a `gradguard` marker and a `gradguard` fixture.

Under the option every test runs under a guard of that level; a test whose training step has a diagnosis fails with it.
`@pytest.mark.gradguard("forensic")` chooses for one test, `@pytest.mark.gradguard("off")` leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradguard.runtime.guard import Guard

_LEVELS = ("off", "watch", "standard", "strict", "forensic")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--gradguard=LEVEL`."""
    parser.getgroup("gradguard").addoption(
        "--gradguard",
        choices=_LEVELS,
        default=None,
        nargs="?",
        const="strict",
        help="run every test under a gradguard of this level (strict if none is named)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", "gradguard(level='strict', **settings): run this test under a gradguard of that level")


def _guard(item: Any) -> Guard | None:
    marker = item.get_closest_marker("gradguard")
    level: str | None = item.config.getoption("--gradguard")
    settings: dict[str, Any] = {}
    if marker is not None:
        settings = dict(marker.kwargs)
        level = marker.args[0] if marker.args else settings.pop("level", None) or level or "strict"
        if level not in _LEVELS:
            raise pytest.UsageError(f"{item.nodeid}: the gradguard marker's level is one of {', '.join(_LEVELS)}, not {level!r}")
    if level is None or level == "off":
        return None
    from gradguard.runtime.guard import Guard  # only now: a test run that asks for no guard must not load torch for it

    return Guard(level=level, **settings)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Runs the test's body under its guard; diagnoses that only warned fail the test too."""
    guard = _guard(item)
    if guard is None:
        return (yield)
    before = len(guard.diagnoses)
    with guard:
        result = yield
    found = [diagnosis for diagnosis in guard.diagnoses[before:] if diagnosis.severity != "info"]
    if found:
        from gradguard.reporting.terminal.render import render_for_error

        pytest.fail("\n\n".join(render_for_error(diagnosis) for diagnosis in found), pytrace=False)
    return result


@pytest.fixture
def gradguard(request: pytest.FixtureRequest) -> Iterator[Guard]:
    """A guard that is open for the test's whole body; `gradguard.diagnoses` is what it found."""
    from gradguard.runtime.guard import Guard

    with Guard(level=request.config.getoption("--gradguard") or "strict") as guard:
        yield guard
