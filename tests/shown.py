"""What the programs of the documentation print: README.md, the pages under docs/ and the failing program of each rule's page.

`python -m tests.shown` writes all of it anew (`make shown`), or that of the rules named: `python -m tests.shown GG101 GG604`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cases import case, zygote
from tests.cases.zygote import run_apart

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "docs" / "programs"
PLAIN = {"NO_COLOR": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}


BLOCK = re.compile(
    r"(?P<head><!-- output: (?P<command>[^|>]+?)(?: \| tail (?P<tail>\d+))? -->\n```text\n)(?P<shown>.*?)(?P<foot>```\n<!-- /output -->)",
    re.S,
)


def pages() -> list[Path]:
    """README.md and what mkdocs makes pages of."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "rules.md"),
    ]


def printed(command: str, tail: str | None = None) -> str:
    """What a command of a page prints, started at the top of the repository."""
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "printed.txt")
        run_apart(run_command if words[0] == "gradguard" else run_python, (words[1:],), ROOT, 120, output)
        lines = cleaned(output.read_text(encoding="utf-8"), ROOT)
    return "".join(line + "\n" for line in lines[-int(tail or 0) :])


def said_of(script: Path) -> tuple[int, str, list[dict[str, Any]]]:
    """What `gradguard run` says of a rule's failing program: the exit status, the text, the diagnoses."""
    status, text, said = run_guarded(script, ranks=has_ranks(script))
    return status, "".join(line + "\n" for line in cleaned(text, script.parent)), said


def plain(text: str) -> str:
    """Without the numbers of ranks: which one is the first to tell is chance."""
    return re.sub(r"\b(rank)s?( ?)\d(?: and \d)?", r"\1\2", text)


def cleaned(text: str, folder: Path) -> list[str]:
    """Lines free of what differs between machines, runs and Python versions."""
    text = text.replace(f"{folder}{os.sep}", "")
    text = re.sub(r"[^\s\"\']*site-packages/", "site-packages/", text)
    text = re.sub(r"(?:\[rank\d\]: )? *File \"[^\"]*tests/(?:shown|cases/\w+)\.py\".*\n.*\n", "", text)  # they start the program
    text = re.sub(r"(?:\[rank\d\]: )?\n?(?:\[rank\d\]: )?  PyTorch said:\n.*\.cc:\d+\].*\n", "", text)  # how a connection broke is chance
    text = re.sub(r"^(?:[GT]PU available|💡 Tip|.*_pytree\.py:).*\n", "", text, flags=re.M)  # Lightning's greeting
    # the marks under a traceback's lines differ between Python versions (those of a diagnosis stand behind a bar)
    return [line for line in text.splitlines() if not re.fullmatch(r"(?:\[rank\d\]: )? {4,}[~^]+", line)]


def run_python(arguments: list[str]) -> None:
    """`python ARGUMENTS`, in a process of its own."""
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **PLAIN})


def run_command(arguments: list[str]) -> None:
    """`gradguard ARGUMENTS`, in a process of its own."""
    from gradguard.cli.main import main
    from gradguard.core.callsite import USER_FILES

    USER_FILES.update(dict.fromkeys([case.__file__, zygote.__file__, __file__], False))  # they are no part of the program
    os.environ.update(PLAIN)
    for name in [name for name in os.environ if name.startswith("GRADGUARD")]:
        del os.environ[name]
    main(arguments)


def run_ranks(arguments: list[str]) -> None:
    """The same in two ranks, as torchrun starts them; what rank 0 prints comes first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                    target = os.open(Path(folder, str(rank)), os.O_CREAT | os.O_WRONLY)
                    os.dup2(target, 1)
                    os.dup2(target, 2)
                    run_command(arguments)
                    status = 0
                except SystemExit as error:
                    status = error.code if isinstance(error.code, int) else int(error.code is not None)
                except BaseException as error:
                    sys.excepthook(type(error), error, error.__traceback__)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            ranks.append(child)
        status = max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in ranks)
        texts = [Path(folder, str(rank)).read_text() for rank in range(2)]
    print(max(texts, key=lambda text: "[GG" in text), end="")
    sys.exit(status)


def run_guarded(script: Path, *arguments: str, level: str = "standard", ranks: bool = False) -> tuple[int, str, list[dict[str, Any]]]:
    """`gradguard run SCRIPT` in the script's folder: the exit status, what it prints, what it diagnoses."""
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report.jsonl"), Path(folder, "printed.txt")
        words = ["run", "--level", level, "--report", str(report), script.name, *arguments]
        status = run_apart(run_ranks if ranks else run_command, (words,), script.parent, 120, output)
        said = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        return status, output.read_text(encoding="utf-8", errors="replace"), said


def has_ranks(script: Path) -> bool:
    return "init_process_group" in script.read_text()


def write(rules: list[str]) -> None:
    for script in sorted(PROGRAMS.glob("gg???.py")):
        if rules and script.stem.upper() not in rules:
            continue
        status, text, said = said_of(script)
        shows = script.with_suffix(".txt")
        if not shows.exists() or plain(shows.read_text(encoding="utf-8")) != plain(text):
            shows.write_text(text, encoding="utf-8")
        print(script.name, status, [each["code"] for each in said], flush=True)
    for path in [] if rules else pages():
        text = path.read_text(encoding="utf-8")
        path.write_text(
            BLOCK.sub(lambda block: block["head"] + printed(block["command"], block["tail"]) + block["foot"], text), encoding="utf-8"
        )


if __name__ == "__main__":
    from tests import shown  # what is run in other processes is a function of that module

    shown.write(sys.argv[1:])
