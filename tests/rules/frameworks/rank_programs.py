"""Runs programs of several ranks, each forked from this process, which has torch imported and no process group.

Reads programs by name, each {"source", "world", "settings", "seconds"}, as JSON; writes what each rank has said and how it ended.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it in every rank
import torch.distributed as dist
import torch.nn.parallel
import torch.utils.data

from gradguard import gradguard
from gradguard.core.errors import GradGuardWarning
from gradguard.rules.registry import all_rules

torch.set_num_threads(1)


class _Notes(logging.Handler):
    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def rank_of(rank: int, request: dict[str, Any], folder: Path, port: int) -> None:
    """One rank: the program, under the guard unless the settings are None."""
    told: list[str] = []
    found: dict[str, Any] = {"rank": rank, "status": 0, "error": "", "type": "", "torch": "", "log": told, "diagnoses": [], "at": []}
    began = time.monotonic()
    logging.getLogger("gradguard").addHandler(_Notes(told))
    logging.getLogger("gradguard").propagate = False
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", GradGuardWarning)
    warnings.showwarning = lambda *args, **kwargs: found["at"].append(round(time.monotonic() - began, 1))  # type: ignore[assignment]
    faulthandler.dump_traceback_later(90, exit=True)
    path = folder / "train.py"
    world = request["world"]
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=request["seconds"]))
    names: dict[str, Any] = {"__name__": "__main__", "rank": rank, "world": world, "dist": dist, "torch": torch, "time": time, "os": os}
    names |= {"signal": signal, "threading": threading, "nn": torch.nn}
    names["told"] = lambda: (folder / "report.jsonl").exists() or time.monotonic() - began > 40
    code = compile(request["source"], str(path), "exec")
    guard = None if request["settings"] is None else gradguard(**request["settings"], report=str(folder / "report.jsonl"))
    try:
        if guard is None:
            exec(code, names)
        else:
            with guard:
                exec(code, names)
    except BaseException as error:
        cause = error.__cause__ or error
        found |= {"status": 1, "error": str(error), "type": type(cause).__name__, "torch": str(cause)[:300]}
        found["trace"] = "".join(traceback.format_exception(error))[-3000:]
    caught = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt:"))
    found["handled"] = bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    found["seconds"] = time.monotonic() - began
    if guard is not None:
        found["diagnoses"] = [json.loads(each.model_dump_json()) for each in guard.diagnoses]
    (folder / f"out-{rank}.json").write_text(json.dumps(found))


def job(request: dict[str, Any]) -> dict[str, Any]:
    """All ranks of one program, until the last has ended."""
    folder, began = Path(tempfile.mkdtemp(prefix="ranks-")), time.time()
    world = request["world"]
    (folder / "train.py").write_text(request["source"])
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    pids = [_forked(lambda rank=rank: rank_of(rank, request, folder, store.port), folder / f"err-{rank}") for rank in range(world)]
    until = time.monotonic() + 100
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    report = folder / "report.jsonl"
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    after = report.stat().st_mtime - began if lines else 0.0
    outs = [folder / f"out-{rank}.json" for rank in range(world)]
    err = "".join((folder / f"err-{rank}").read_text(errors="replace")[-2000:] for rank in range(world))
    found = [json.loads(out.read_text()) if out.exists() else None for out in outs]
    shutil.rmtree(folder)
    return {"ranks": found, "report": lines, "after": after, "stderr": err}


def _forked(run: Callable[[], None], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        stream = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        run()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def jobs(requests: dict[str, dict[str, Any]], at_once: int) -> dict[str, dict[str, Any]]:
    """Several programs, so many at the same time: most of them only wait."""
    folder = Path(tempfile.mkdtemp(prefix="jobs-"))
    waiting, running = list(requests), dict[int, str]()
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)

            def run(name: str = name) -> None:
                (folder / name).write_text(json.dumps(job(requests[name])))

            running[_forked(run, folder / f"{name}.err")] = name
        pid, _ = os.wait()
        running.pop(pid, None)
    found = {name: json.loads((folder / name).read_text()) for name in requests}
    shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    all_rules()
    gradguard()
    print(json.dumps(jobs(json.load(sys.stdin), int(sys.argv[1]))))
