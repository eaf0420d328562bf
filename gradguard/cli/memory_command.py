"""`gradguard memory`: a program runs, and what held memory at its fullest moment is said and written."""

from __future__ import annotations

import sys
from pathlib import Path

from gradguard.cli.script import run_program
from gradguard.config.settings import load_settings
from gradguard.core import ranks
from gradguard.core.foreign_exceptions import internal_error
from gradguard.reporting.html.icicle import memory_page
from gradguard.reporting.jsonl import begin_anew, write_memory
from gradguard.runtime.guard import Guard, gradguard


def run_accounted(
    target: str,
    arguments: list[str],
    as_module: bool,
    level: str,
    config: Path | None,
    report: Path | None,
    page: Path | None,
    color: bool | None,
) -> None:
    """Runs the program to its end in this process; see `gradguard.cli.script.run_program`.

    Args:
        report: a file that gets one JSON object a line, module and operation.
        page: a file that gets the page.
        color: whether to colour; None: as the terminal has it.
    """
    guards: list[Guard] = []

    def begin() -> Guard:
        never = "never" if color is False else None
        guard = gradguard(settings=load_settings(level=level, config=config, color=never, memory=True))
        guard.diagnoser.launched = True
        if report is not None and ranks.begins_the_launch():
            begin_anew(report)
        guards.append(guard)
        return guard

    def finish(error: BaseException | None) -> None:
        for guard in guards:
            guard.run.tell_memory()
            found = guard.run.watch.report()
            if found is None:
                print("gradguard memory: no backward call was seen, and nothing was saved for one", file=sys.stderr)
                return
            try:
                if report is not None:
                    write_memory(report, found)
                if page is not None:
                    page.write_text(memory_page(found), encoding="utf-8")
            except internal_error(OSError) as fault:
                print(f"gradguard memory: cannot write {getattr(fault, 'filename', None) or report or page}: {fault}", file=sys.stderr)

    run_program(target, arguments, begin, as_module=as_module, color=color, finish=finish)
