"""Real programs with a second backward: which rule speaks, where it points, which names it gives, at the default level and at
`watch`, where nothing was traced."""

from __future__ import annotations

import pytest
from lifetime_programs import ALL, HEAD, Program

from tests.running import Run


def marked(source: str) -> tuple[str, set[int]]:
    """The program without its marks, and the lines that were marked."""
    lines = (HEAD + source).splitlines()
    return "\n".join(line.removesuffix("  # <<") for line in lines) + "\n", {n for n, line in enumerate(lines, 1) if line.endswith("# <<")}


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", ALL, ids=lambda program: program.slug)
def test_names_cause_and_culprit(run: Run, program: Program, level: str) -> None:
    source, culprits = marked(program.source)
    said = run(source, level)
    loud = [(diagnosis, text) for diagnosis, text in said if diagnosis.severity == "error"]
    assert loud, "the program did not fail"
    diagnosis, text = loud[0]
    assert diagnosis.code == program.code, text
    assert diagnosis.culprit is not None, text
    assert diagnosis.culprit.line in culprits, text
    for name in program.names:
        assert name in text
