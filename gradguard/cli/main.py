"""The `gradguard` command: run, memory, fix, sarif, explain, rules, schema, doctor, demo, config."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradguard.cli.config_command import app as config_commands
from gradguard.cli.schema_command import Schema, schema_text
from gradguard.core.errors import ConfigError, UnknownRuleError

if TYPE_CHECKING:
    from gradguard.cli.machine_output import MachineOutput, Output
    from gradguard.cli.verified_run import VerifiedRun
    from gradguard.rules.base import Rule
    from gradguard.runtime.guard import Guard

_EXIT_STATUS = """Exit status

run, memory: the program's own, as under python: 0 at its end, what it gives to sys.exit, 1 for an exception that nothing catches, \
which a diagnosis is too, or death by a signal. What is only warned of changes nothing; --level strict raises it. 2 where the \
program cannot be started, 1 where its module is not found.

fix: 0 for changes that are shown or made, or nothing to do; 1 for none that can be made, or the program's own; 2 for a file that \
is no report or has changed since.

doctor: 0 where all works, 1 where something does not. config: 1 for settings that are wrong. All: 2 for a wrong command line, or \
what cannot be read.
"""

app = typer.Typer(
    name="gradguard",
    help="Training-loop guard for PyTorch: names the line that is the bug.",
    epilog=_EXIT_STATUS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config_commands, name="config")

# The program that `run` was asked for. It is started after the command line's own frames and handlers are gone.
_to_run: list[Callable[[], None]] = []


class OutputFormat(str, Enum):
    """How what is found is printed, or written to a report."""

    text = "text"
    json = "json"
    github = "github"
    sarif = "sarif"
    jsonl = "jsonl"


class Level(str, Enum):
    """How closely to look; see `gradguard config show`."""

    off = "off"
    watch = "watch"
    standard = "standard"
    strict = "strict"
    forensic = "forensic"


class Format(str, Enum):
    """How `gradguard rules` prints."""

    text = "text"
    markdown = "markdown"
    json = "json"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `gradguard` and `python -m gradguard`; never returns normally, except after a program that ended so."""
    command = typer.main.get_command(app)
    try:
        command.main(args=arguments, prog_name="gradguard")
    except SystemExit:
        if not _to_run:
            raise
    _to_run.pop()()


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"gradguard {version('gradguard')}")
        except PackageNotFoundError:
            print("gradguard (not installed)")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")] = False,
) -> None:
    pass


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT|MODULE", help="The program; a folder or zip file with __main__.py, or - too.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the program as they are.")] = None,
    module: Annotated[bool, typer.Option("-m", help="The target is a module's name, as in `python -m`.")] = False,
    level: Annotated[Level | None, typer.Option(help="How closely to look.", show_default="standard, or as configured")] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one JSON object a diagnosis, and at the end a SARIF log of it where FILE is one."),
    ] = None,
    format: Annotated[
        OutputFormat | None,
        typer.Option(
            help="What to print: text for people; on stdout when the program ends, json or sarif (its own stdout goes to stderr then) or "
            "github, annotations of a pull request. With --report, sarif and jsonl say what FILE is.",
            show_default="text, and a report as FILE ends",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page that shows each diagnosis with the graph around it.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A YAML file of settings.")] = None,
    no_color: Annotated[bool, typer.Option("--no-color", help="Plain text, on a terminal too.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show all that is known: events, tensors, every fix.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="One line a diagnosis, file:line: code headline.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Print what the run did when it ends.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Print what holds memory when it ends; see `gradguard memory`.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Run the program again with each fix, and say which one repairs it.")] = False,
    trial: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run an unmodified program under the guard, as python runs it."""
    if trial is not None:
        _to_run.append(lambda: _run_as_trial(trial, target, arguments or [], module))
        return
    if verbose and quiet:
        raise typer.BadParameter("-v and -q exclude each other", param_hint="-q")
    log: Path | None = None
    printed: Output | None = None
    if format is OutputFormat.json or format is OutputFormat.github:
        printed = format.value
    elif format is OutputFormat.sarif and report is None:
        printed = "sarif"
    elif format is OutputFormat.jsonl and report is None:
        raise typer.BadParameter("jsonl is a report's format and needs --report FILE; json prints to stdout", param_hint="--format")
    if report is not None:
        if format is OutputFormat.sarif or (format is not OutputFormat.jsonl and report.suffix == ".sarif"):
            log, report = _checked_log(report)
        else:
            report = _checked_report(report)
    if html is not None:
        html = _checked_page(html)
    if config is not None and not config.is_file():
        raise typer.BadParameter(f"no such file: {config}", param_hint="--config")

    def start() -> None:
        from gradguard.cli.script import run_program

        verified: list[VerifiedRun] = []
        if printed is not None:
            from gradguard.cli.machine_output import MachineOutput

            machines.append(MachineOutput(printed))

        def begin() -> Guard:
            guard = make_guard()
            if guard.settings.verify:
                from gradguard.cli.verified_run import VerifiedRun
                from gradguard.runtime.trials.trial import Launch

                verified.append(VerifiedRun(Launch(target, tuple(arguments or ()), module), guard))
            return guard

        def finish(error: BaseException | None) -> None:
            for each in verified:
                each.finish(error)

        run_program(target, arguments or [], begin, as_module=module, color=False if no_color else None, finish=finish)

    machines: list[MachineOutput] = []

    def make_guard() -> Guard:
        from gradguard.config.settings import load_settings
        from gradguard.core import ranks
        from gradguard.reporting.jsonl import begin_anew
        from gradguard.runtime.guard import gradguard

        settings = load_settings(
            level=level.value if level else None,
            config=config,
            report=report,
            html=html,
            color="never" if no_color else None,
            verbosity="verbose" if verbose else "quiet" if quiet else None,
            summary=summary or None,
            memory=memory or None,
            verify=verify or None,
        )
        if report is not None and ranks.begins_the_launch():
            begin_anew(report)
        if log is not None and report is not None:
            _convert_at_exit(report, log)
        if machines and settings.report is None:
            settings = settings.model_copy(update={"report": machines[0].report()})
        guard = gradguard(settings=settings)
        guard.diagnoser.launched = True
        if machines and guard.diagnoser.report is not None:
            machines[0].read_from(guard.diagnoser.report.path)
        if guard.diagnoser.page is not None and ranks.begins_the_launch():
            guard.diagnoser.page.begin()
        return guard

    _to_run.append(start)


def _run_as_trial(order: Path, target: str, arguments: list[str], module: bool) -> None:
    """What `gradguard.runtime.trials.trial` starts."""
    from gradguard.cli.script import run_program
    from gradguard.runtime.trials.observer import Observer

    observer = Observer.of(order)
    run_program(target, arguments, observer.begin, as_module=module, finish=observer.raised)


def _convert_at_exit(report: Path, log: Path) -> None:
    """What is said until the very end is in the log; a process that is killed leaves the report that it is made of."""
    import atexit

    from gradguard.cli.sarif_command import convert

    atexit.register(convert, report, log, os.getcwd())  # functions that are registered later run before


def _checked_log(path: Path) -> tuple[Path, Path]:
    """The paths of a SARIF log and of the report that it is made of."""
    from gradguard.cli.sarif_command import report_beside
    from gradguard.reporting.sarif import refuse_other_files

    log = _checked_report(path, refuse_other_files)
    report = report_beside(log)
    if report == log:
        raise typer.BadParameter("a SARIF log is not named .jsonl, as the report that it is made of", param_hint="--report")
    return log, _checked_report(report)


def _checked_page(path: Path) -> Path:
    """The page's absolute path; see `_checked_report`."""
    from gradguard.reporting.html.html_report import check_page

    return _checked_report(path, check_page, "--html")


def _checked_report(path: Path, check: Callable[[Path], None] | None = None, option: str = "--report") -> Path:
    """The report's absolute path (the program may change directory); nothing is written before the program is ready to start."""
    from gradguard.reporting.jsonl import refuse_other_files

    path = Path(os.path.abspath(path))
    try:
        (check or refuse_other_files)(path)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    needed = [path, path.parent] if path.is_file() else [path] if path.exists() else [path.parent]
    if not all(os.access(each, os.W_OK) for each in needed):
        raise typer.BadParameter(f"cannot write {path}", param_hint=option)
    return path


@app.command(context_settings={"allow_interspersed_args": False})
def memory(
    target: Annotated[str, typer.Argument(metavar="SCRIPT|MODULE", help="The program; a folder or zip file with __main__.py, or - too.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the program as they are.")] = None,
    module: Annotated[bool, typer.Option("-m", help="The target is a module's name, as in `python -m`.")] = False,
    level: Annotated[Level, typer.Option(help="How closely to look for bugs meanwhile.")] = Level.watch,
    report: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Write one JSON object a line, module and operation.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with an icicle by module and by line.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A YAML file of settings.")] = None,
    no_color: Annotated[bool, typer.Option("--no-color", help="Plain text, on a terminal too.")] = False,
) -> None:
    """Run a program and say what holds memory at the fullest moment of a step: by line, module and operation."""
    if report is not None:
        report = _checked_report(report)
    if html is not None and not os.access(html if html.exists() else html.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"cannot write {html}", param_hint="--html")
    if config is not None and not config.is_file():
        raise typer.BadParameter(f"no such file: {config}", param_hint="--config")
    page = None if html is None else Path(os.path.abspath(html))

    def start() -> None:
        from gradguard.cli.memory_command import run_accounted

        run_accounted(target, arguments or [], module, level.value, config, report, page, color=False if no_color else None)

    _to_run.append(start)


@app.command(context_settings={"allow_interspersed_args": False})
def fix(
    target: Annotated[str, typer.Argument(metavar="REPORT.jsonl|SCRIPT|MODULE", help="A report of `run --report`, or a program to run.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the program as they are.")] = None,
    module: Annotated[bool, typer.Option("-m", help="The target is a module's name, as in `python -m`.")] = False,
    level: Annotated[
        Level | None, typer.Option(help="How closely to look at the program.", show_default="standard, or as configured")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply/--diff", help="Change the files, or show what is recommended.")] = False,
    unsafe: Annotated[bool, typer.Option("--unsafe", help="With --apply, make fixes too that change what is computed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before files are changed.")] = False,
) -> None:
    """Show or make the changes that a report, or a run of a program, recommends.

    Every file keeps a backup beside it (FILE.bak). A file that has changed since the run, is not inside the project around the working
    directory, or belongs to a library is not touched.
    """
    from gradguard.cli.fix_command import fix_program, fix_report, is_report

    path = Path(target)
    if is_report(path) and not module:
        if arguments or level:
            raise typer.BadParameter("a report takes no arguments and no level", param_hint="REPORT.jsonl")
        raise typer.Exit(fix_report(path, apply, unsafe, ask=not yes))
    raise typer.Exit(fix_program(target, arguments or [], module, level.value if level else None, apply, unsafe, ask=not yes))


@app.command()
def sarif(
    report: Annotated[Path, typer.Argument(metavar="REPORT.jsonl", help="A report of `run --report`.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.sarif", help="Where to.", show_default="stdout")] = None,
) -> None:
    """Write a report as a SARIF 2.1.0 log, for code hosts and editors."""
    from gradguard.cli.sarif_command import convert

    raise typer.Exit(convert(report, output))


@app.command()
def explain(rule: Annotated[str, typer.Argument(help="A rule's code or name, such as GG101; or a family, such as GG1.")]) -> None:
    """Explain a rule: what it is, why it is wrong, what to write instead."""
    from rich.console import Console
    from rich.markdown import Markdown

    from gradguard.cli.rule_pages import as_text, page

    found = _rules(rule)
    if len(found) > 1:
        print(as_text(found))
        return
    console = Console()
    console.print(Markdown(page(found[0])))


@app.command()
def rules(
    family: Annotated[str | None, typer.Option(help="Only these, such as GG1.")] = None,
    format: Annotated[Format, typer.Option(help="markdown is what docs/rules.md holds.")] = Format.text,
) -> None:
    """List the rules."""
    from gradguard.cli.rule_pages import as_json, as_markdown, as_text
    from gradguard.rules.registry import all_rules

    chosen = _rules(family) if family else all_rules()
    write = {Format.text: as_text, Format.markdown: as_markdown, Format.json: as_json}[format]
    print(write(chosen))


@app.command()
def schema(of: Annotated[Schema, typer.Argument(help="report and memory: of one line of `--report FILE.jsonl`.")]) -> None:
    """Print a JSON schema: of a line of a report, of a memory report, or of the settings."""
    print(schema_text(of))


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Tell versions, what is patched while a guard is on, and which probes work on this PyTorch; for a bug report."""
    from gradguard.cli import doctor_command

    raise typer.Exit(doctor_command.run(json))


def _rules(selector: str) -> tuple[Rule, ...]:
    from gradguard.rules.registry import find_rules

    try:
        return find_rules(selector)
    except UnknownRuleError as error:
        print(f"gradguard: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@app.command()
def demo() -> None:
    """Run a small training loop with a real bug, then the repaired one."""
    from gradguard.cli.demo import show

    raise typer.Exit(show())
