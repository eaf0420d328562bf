"""Runs programs of several ranks, each forked from this process, which has torch imported and no process group.

Reads one JSON object a line: {"source", "world", "settings", "seconds"}; writes one a line: what each rank has said and how it ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradguard import gradguard
from gradguard.core.errors import GradGuardWarning

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
    path = folder / "train.py"
    world = request["world"]
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=request["seconds"]))
    names: dict[str, Any] = {"__name__": "__main__", "rank": rank, "world": world, "dist": dist, "torch": torch, "time": time, "os": os}
    names |= {"signal": signal, "folder": str(folder), "nn": torch.nn}
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
    found["seconds"] = time.monotonic() - began
    if guard is not None:
        found["diagnoses"] = [json.loads(each.model_dump_json()) for each in guard.diagnoses]
    (folder / f"out-{rank}.json").write_text(json.dumps(found))


def job(request: dict[str, Any]) -> dict[str, Any]:
    """All ranks of one program, until the last has ended."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    (folder / "train.py").write_text(request["source"])
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    pids = []
    for rank in range(request["world"]):
        pid = os.fork()
        if not pid:
            try:
                devnull = os.open(str(folder / f"err-{rank}"), os.O_WRONLY | os.O_CREAT)
                os.dup2(devnull, 1)
                os.dup2(devnull, 2)
                rank_of(rank, request, folder, store.port)
            finally:
                os._exit(0)
        pids.append(pid)
    until = time.monotonic() + 60
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    report = folder / "report.jsonl"
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    outs = [folder / f"out-{rank}.json" for rank in range(request["world"])]
    err = "".join((folder / f"err-{rank}").read_text(errors="replace")[-2000:] for rank in range(request["world"]))
    return {"ranks": [json.loads(out.read_text()) if out.exists() else None for out in outs], "report": lines, "stderr": err}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(job(json.loads(line))), flush=True)
