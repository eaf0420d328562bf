"""`gradguard run` is `python`, but for the diagnosis: every test runs the same program both ways and compares."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from cli_programs import assert_same, environment, guarded, python, write

DESCRIBE = """
import os, sys, json
import __main__
names = ("__name__", "__file__", "__package__", "__cached__", "__doc__")
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "cwd": os.getcwd(),
    **{name: globals().get(name, "missing") for name in names},
    "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
    "is_main": vars(__main__) is globals(), "builtins": type(__builtins__).__name__,
    "names": sorted(name for name in globals() if name.startswith("__")),
}))
"""


# Where the program finds itself


def test_script_in_another_folder(tmp_path: Path) -> None:
    write(tmp_path, "code/describe.py", DESCRIBE)
    told = json.loads(assert_same("code/describe.py", "a", "b c", cwd=tmp_path).out)
    assert told["argv"] == ["code/describe.py", "a", "b c"]
    assert told["path0"] == str(tmp_path / "code")


def test_script_by_other_spellings_of_its_path(tmp_path: Path) -> None:
    script = write(tmp_path, "code/describe.py", DESCRIBE)
    (tmp_path / "link.py").symlink_to(script)
    assert_same("./code/describe.py", cwd=tmp_path)
    assert_same(str(script), cwd=tmp_path)
    assert_same("link.py", cwd=tmp_path)


def test_options_after_the_script_are_the_scripts(tmp_path: Path) -> None:
    write(tmp_path, "train.py", DESCRIBE)
    told = assert_same("train.py", "--level", "3", "-m", "--report=x", "--", "--help", cwd=tmp_path)
    assert json.loads(told.out)["argv"] == ["train.py", "--level", "3", "-m", "--report=x", "--", "--help"]


def test_module(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "")
    write(tmp_path, "pkg/train.py", DESCRIBE)
    told = json.loads(assert_same("-m", "pkg.train", "--level", "3", cwd=tmp_path).out)
    assert told["__package__"] == "pkg" and told["spec"] == "pkg.train"


def test_package_with_main(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "import sys; print(sys.argv)")
    write(tmp_path, "pkg/helper.py", "value = 3")
    write(tmp_path, "pkg/__main__.py", "from .helper import value; print(value)\n" + DESCRIBE)
    assert assert_same("-m", "pkg", "x", cwd=tmp_path).status == 0


def test_folder_and_zip_file(tmp_path: Path) -> None:
    main = write(tmp_path, "app/__main__.py", DESCRIBE)
    assert_same("app", "x", cwd=tmp_path)
    import zipfile

    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(main, "__main__.py")
    assert_same("app.zip", "x", cwd=tmp_path)


def test_standard_input(tmp_path: Path) -> None:
    told = assert_same("-", "x", cwd=tmp_path, text="import sys; print(sys.argv, repr(sys.path[0]), __name__)")
    assert told.out == "['-', 'x'] '' __main__\n"


def test_safe_path_is_respected(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("-P is new in Python 3.11")
    write(tmp_path, "describe.py", DESCRIBE)
    assert_same("describe.py", cwd=tmp_path, flags=("-P",))


def test_own_source_can_be_read(tmp_path: Path) -> None:
    program = """
        import inspect, linecache, sys

        def shown():
            return 1

        class Shown:
            pass

        print(inspect.getsource(shown), inspect.getsource(Shown), inspect.getsource(sys.modules["__main__"])[:20])
        print(linecache.getline(__file__, 4), inspect.stack()[0].filename == __file__)
    """
    write(tmp_path, "own.py", program)
    assert assert_same("own.py", cwd=tmp_path).status == 0


def test_future_imports_do_not_leak_in(tmp_path: Path) -> None:
    write(tmp_path, "plain.py", "def f(x: int): pass\nprint(f.__annotations__)")
    assert assert_same("plain.py", cwd=tmp_path).out == "{'x': <class 'int'>}\n"


# How it ends


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('told why')", 1),
        ("raise SystemExit(None)", 0),
        ("raise SystemExit((1, 2))", 1),
        ("raise ValueError('plain')", 1),
        ("os._exit(9)", 9),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_exit_status(tmp_path: Path, ending: str, status: int) -> None:
    program = f"""
        import atexit, os, signal, sys, threading, time
        atexit.register(print, "at exit", flush=True)

        class Kept:
            def __del__(self):
                print("let go", flush=True)

        kept = Kept()
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread done", flush=True))).start()
        {ending}
    """
    write(tmp_path, "ending.py", program)
    assert assert_same("ending.py", cwd=tmp_path).status == status


def test_interrupt_from_outside(tmp_path: Path) -> None:
    program = """
        import time
        print("up", flush=True)
        try:
            time.sleep(60)
        finally:
            print("cleaned up", flush=True)
    """
    script = write(tmp_path, "wait.py", program)
    ends = []
    for command in ([sys.executable, "wait.py"], [sys.executable, "-m", "gradguard", "run", "wait.py"]):
        child = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` has it ignored
        )
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        ends.append((child.returncode, out, err))
    assert ends[0] == ends[1]
    assert ends[0][0] == -signal.SIGINT and str(script) in ends[0][2]


def test_signal_handlers_are_pythons(tmp_path: Path) -> None:
    program = """
        import signal
        print([(s.name, str(signal.getsignal(s))[:30]) for s in sorted(signal.valid_signals()) if isinstance(s, signal.Signals)])
    """
    write(tmp_path, "handlers.py", program)
    assert_same("handlers.py", cwd=tmp_path)


# What is shown of an uncaught exception


UNCAUGHT = {
    "nested calls": """
        def inner():
            {}["key"]

        def outer():
            inner()

        outer()
    """,
    "cause and context": """
        try:
            try:
                1 / 0
            except ZeroDivisionError:
                int("x")
        except ValueError as error:
            raise RuntimeError("told\\nin two lines") from error
    """,
    "in a library": "import json\njson.loads('{')",
    "in an imported module": "import broken_module",
    "missing module": "import no_such_module_anywhere",
    "syntax error": "x = 1\nif x\n    pass",
    "syntax error in an imported module": "import broken_syntax",
    "torch error": "import torch\nimport torch.nn.functional as F\nF.linear(torch.ones(2, 3), torch.ones(4, 5))",
    "torch error inside modules": """
        import torch
        from torch import nn
        nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 5))(torch.ones(1, 2))
    """,
    "user's own error out of backward": """
        import torch
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        def hook(grad):
            raise KeyError("mine")
        y.register_hook(hook)
        y.sum().backward()
    """,
    "own hook": """
        import sys
        def hook(kind, error, trace):
            import traceback
            print("hooked", kind.__name__, [entry.name for entry in traceback.extract_tb(trace)], error.__traceback__ is trace)
            print(sys.excepthook is hook, sys.last_value is error, sys.last_traceback is trace)
        sys.excepthook = hook
        def f():
            raise ValueError("x")
        f()
    """,
    "broken hook": """
        import sys
        sys.excepthook = lambda *a: 1 / 0
        raise ValueError("x")
    """,
    "post mortem": """
        import atexit, sys, traceback
        atexit.register(lambda: traceback.print_tb(sys.last_traceback))
        atexit.register(lambda: print(repr(sys.last_value)))
        raise ValueError("x")
    """,
    "in a thread": """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start()
        thread.join()
    """,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=pytest.mark.slow) if number > 5 else each for number, each in enumerate(UNCAUGHT)]
)
def test_traceback_is_pythons_own(tmp_path: Path, kind: str) -> None:
    write(tmp_path, "broken_module.py", "def f():\n    raise OSError('at import')\nf()")
    write(tmp_path, "broken_syntax.py", "def f(:\n    pass")
    write(tmp_path, "failing.py", UNCAUGHT[kind])
    ended = assert_same("failing.py", cwd=tmp_path)
    assert "gradguard" not in ended.err


def test_recursion_ends_as_in_python(tmp_path: Path) -> None:
    """The same but for how deep it went: gradguard's own frames stand on the stack too."""
    write(tmp_path, "failing.py", "def f(): f()\nf()")
    plain, ended = python("failing.py", cwd=tmp_path), guarded("failing.py", cwd=tmp_path)
    assert re.sub(r"\d+ more", "", ended.err) == re.sub(r"\d+ more", "", plain.err)
    assert ended.status == plain.status


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
def test_exception_group(tmp_path: Path) -> None:
    program = """
        def fails(n):
            raise ValueError(n)
        errors = []
        for n in range(2):
            try:
                fails(n)
            except ValueError as error:
                errors.append(error)
        raise ExceptionGroup("several", errors)
    """
    write(tmp_path, "failing.py", program)
    assert_same("failing.py", cwd=tmp_path)


def test_failing_package_is_the_programs_error(tmp_path: Path) -> None:
    """Plain python shows runpy's frames here; gradguard shows the package's alone."""
    write(tmp_path, "pkg/__init__.py", "import no_such_module_anywhere")
    write(tmp_path, "pkg/__main__.py", "")
    ended = guarded("-m", "pkg", cwd=tmp_path)
    assert ended.status == 1
    assert ended.err.splitlines()[0] == "Traceback (most recent call last):"
    assert f'File "{tmp_path}/pkg/__init__.py", line 1, in <module>' in ended.err
    assert ended.err.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert "runpy" not in ended.err and "gradguard" not in ended.err


# Pickling and processes


def test_pickle_of_main_classes(tmp_path: Path) -> None:
    program = """
        import io, pickle, torch
        from dataclasses import dataclass

        @dataclass
        class Config:
            width: int

        kept = pickle.loads(pickle.dumps(Config(3)))
        print(kept, type(kept) is Config, Config.__module__)
        buffer = io.BytesIO()
        torch.save(Config(4), buffer)
        buffer.seek(0)
        print(torch.load(buffer, weights_only=False))
    """
    write(tmp_path, "pickles.py", program)
    assert assert_same("pickles.py", cwd=tmp_path).status == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes(tmp_path: Path, method: str) -> None:
    program = f"""
        import multiprocessing, sys

        class Item:
            def __init__(self, n):
                self.n = n

        def work(item):
            return item.n ** 2, __name__, type(item).__module__

        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            with context.Pool(2) as pool:
                print(pool.map(work, [Item(n) for n in range(3)], chunksize=3), sys.argv)
            child = context.Process(target=sys.exit, args=(5,))
            child.start()
            child.join()
            print(child.exitcode)
    """
    write(tmp_path, "processes.py", program)
    ended = assert_same("processes.py", "x", cwd=tmp_path)
    assert ended.status == 0 and ended.err == ""


def test_what_workers_share_is_gone_with_them(tmp_path: Path) -> None:
    program = """
        import glob, os, tempfile
        import torch.multiprocessing as mp

        def work(index, what):
            if what == "raise":
                raise ValueError(index)

        def left():
            return len(glob.glob(os.path.join(tempfile.gettempdir(), "gradguard-*")))

        for what in ("return", "raise"):
            try:
                mp.start_processes(work, (what,), nprocs=1, start_method="fork")
            except Exception as error:
                print(type(error).__name__, left())
            else:
                print(left())
        context = mp.start_processes(work, ("return",), nprocs=1, join=False, start_method="fork")
        print(left())
        while not context.join():
            pass
        print(left())
        mp.start_processes(work, ("return",), nprocs=1, join=False, start_method="fork")
    """
    write(tmp_path, "workers.py", program)
    folder = tmp_path / "temporary"
    folder.mkdir()
    ended = guarded("workers.py", cwd=tmp_path, TMPDIR=str(folder))
    assert ended.out.split() == ["0", "ProcessRaisedException", "0", "1", "0"], ended.err
    assert not list(folder.glob("gradguard-*"))


def test_spawn_from_a_module(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "")
    write(tmp_path, "pkg/numbers.py", "def square(x):\n    return x * x")
    program = """
        import multiprocessing
        from .numbers import square

        def work(n):
            return square(n), __name__

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [3]))
    """
    write(tmp_path, "pkg/train.py", program)
    ended = assert_same("-m", "pkg.train", cwd=tmp_path)
    assert ended.status == 0 and ended.out == "[(9, '__mp_main__')]\n"


def test_data_loader_workers(tmp_path: Path) -> None:
    program = """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, n):
                return torch.tensor([float(n * n)])

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for batch in DataLoader(Squares(), batch_size=4, num_workers=1):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            print(batch.flatten().tolist())
    """
    write(tmp_path, "loader.py", program)
    assert assert_same("loader.py", cwd=tmp_path).status == 0


# gradguard's own options and mistakes in them


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["missing.py"], 2, "can't open file 'missing.py'"),
        (["empty_folder"], 1, "can't find '__main__' module in 'empty_folder'"),
        (["-m", "no_such_module_anywhere"], 1, "No module named no_such_module_anywhere"),
        (["-m", "json.no_such"], 1, "No module named json.no_such"),
        (["-m", "xml"], 1, "xml.__main__"),
        (["-m", "sys"], 1, "no code to run in sys"),
        (["--level", "highest", "ok.py"], 2, "strict"),
        (["--report", "no/such/folder/report.jsonl", "ok.py"], 2, "cannot write"),
        (["--config", "missing.yaml", "ok.py"], 2, "no such file"),
        (["--no-such-option", "ok.py"], 2, "--no-such-option"),
        ([], 2, "Missing argument"),
    ],
)
def test_mistakes_stop_before_the_program_starts(tmp_path: Path, arguments: list[str], status: int, told: str) -> None:
    (tmp_path / "empty_folder").mkdir()
    write(tmp_path, "ok.py", "print('ran')")
    ended = guarded(*arguments, cwd=tmp_path)
    assert ended.status == status
    assert told in ended.err
    assert "ran" not in ended.out and "Traceback" not in ended.err


EARLIER = '{"code":"GG101","message":"of an earlier run"}\n'


def test_report_never_costs_another_file(tmp_path: Path) -> None:
    source = "print('ran')\n"
    write(tmp_path, "train.py", source)
    (tmp_path / "report.jsonl").write_text(EARLIER)
    for arguments in (["--report", "train.py", "out.jsonl"], ["--report", "train.py", "train.py"], ["--report", ".", "train.py"]):
        ended = guarded(*arguments, cwd=tmp_path)
        assert ended.status == 2 and "ran" not in ended.out and "Traceback" not in ended.err
        assert (tmp_path / "train.py").read_text().strip() == source.strip()
    (tmp_path / "gradguard.yaml").write_text("report: train.py\n")  # stated in a file, the same holds
    ended = guarded("train.py", cwd=tmp_path)
    assert ended.status == 2 and "no report of gradguard" in ended.err and "ran" not in ended.out
    (tmp_path / "gradguard.yaml").unlink()
    assert guarded("--report", "report.jsonl", "misspelt.py", cwd=tmp_path).status == 2
    assert (tmp_path / "report.jsonl").read_text() == EARLIER  # nothing ran: the earlier report is still the newest


def test_report_of_several_ranks(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "print('ran')")
    kept = tmp_path / "kept.jsonl"
    kept.write_text(EARLIER)
    os.link(kept, tmp_path / "report.jsonl")
    for env in ({"RANK": "1"}, {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}):  # the first rank may have written by now
        assert guarded("--report", "report.jsonl", "train.py", cwd=tmp_path, **env).status == 0
        assert (tmp_path / "report.jsonl").read_text() == EARLIER
    assert guarded("--report", "report.jsonl", "train.py", cwd=tmp_path, RANK="0").status == 0
    assert (tmp_path / "report.jsonl").read_text() == "" and kept.read_text() == EARLIER
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.jsonl", "report.jsonl", "train.py"]


def test_report_path_survives_a_change_of_folder(tmp_path: Path) -> None:
    write(tmp_path, "elsewhere.py", "import os; os.mkdir('sub'); os.chdir('sub'); print(os.getcwd())")
    (tmp_path / "report.jsonl").write_text(EARLIER)
    assert guarded("--report", "report.jsonl", "elsewhere.py", cwd=tmp_path).status == 0
    assert (tmp_path / "report.jsonl").read_text() == ""
    assert os.listdir(tmp_path / "sub") == []


# The diagnosis


FAILING = """
    import torch

    def grow(x):
        x += 1
        return x

    weight = torch.ones(3, requires_grad=True)
    y = torch.exp(weight)
    grow(y)
    y.sum().backward()
"""


def test_diagnosed_error_is_shown_once(tmp_path: Path) -> None:
    write(tmp_path, "failing.py", FAILING)
    ended = guarded("--report", "report.jsonl", "failing.py", cwd=tmp_path)
    assert ended.status == 1
    assert ended.err.count("Traceback (most recent call last):") == 1
    assert ended.err.count("modified by an inplace operation") == 1
    assert ended.err.count("error[GG101]") == 1
    traceback = ended.err.partition("error[")[0]
    assert 'failing.py", line 11, in <module>' in traceback
    assert "direct cause" not in ended.err and "site-packages" not in traceback and "gradguard" not in traceback
    (reported,) = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert reported["code"] == "GG101" and reported["culprit"]["line"] == 5 and "inplace" in reported["message"]


def test_hook_of_the_program_gets_the_diagnosis(tmp_path: Path) -> None:
    program = """
        import sys, traceback
        def hook(kind, error, trace):
            print(isinstance(error, RuntimeError), error.diagnosis.code, "modified by an inplace" in str(error.__cause__))
            print({entry.filename == __file__ for entry in traceback.extract_tb(trace)})
        sys.excepthook = hook
    """
    write(tmp_path, "failing.py", textwrap.dedent(program) + textwrap.dedent(FAILING))
    ended = guarded("failing.py", cwd=tmp_path)
    assert ended.status == 1 and ended.out == "True GG101 True\n{True}\n"


def test_error_the_program_raises_from_a_diagnosis(tmp_path: Path) -> None:
    program = textwrap.dedent(FAILING).replace("y.sum().backward()", "")
    program += "try:\n    y.sum().backward()\nexcept RuntimeError as error:\n    raise SystemError('gave up') from error\n"
    write(tmp_path, "failing.py", program)
    ended = guarded("failing.py", cwd=tmp_path)
    assert ended.err.count("modified by an inplace operation") == 1
    assert ended.err.splitlines()[-1] == "SystemError: gave up"


def test_caught_diagnosis_goes_on(tmp_path: Path) -> None:
    program = textwrap.dedent(FAILING).replace("y.sum().backward()", "")
    program += "try:\n    y.sum().backward()\nexcept RuntimeError as error:\n    print('caught', type(error).__name__)\n"
    write(tmp_path, "failing.py", program)
    ended = guarded("failing.py", cwd=tmp_path)
    assert ended.status == 0 and ended.out == "caught GradGuardError\n"
