"""Jobs of two and three gloo ranks that hang or fall apart: the cause and the line that are told, and their sound twins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available() or not hasattr(os, "fork"), reason="needs gloo")
_RUNNER = Path(__file__).with_name("rank_programs.py")
_ROOT = Path(__file__).parents[3]


class Case(NamedTuple):
    """A program, the code and the text of the line that is told, pieces of the headline, and what to replace for the sound twin."""

    source: str
    code: str
    line: str
    says: tuple[str, ...]
    twin: tuple[str, str]
    world: int = 2
    severity: str = "error"


DDP = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
"""
CASES = {
    "fewer_batches": Case(
        """
def train(size):
    total = torch.zeros(3)
    for x in torch.ones(size, 3):
        dist.all_reduce(total + x)

train(5 - (rank == 2))
dist.barrier()
""",
        "GG707",
        "for x in torch.ones(size, 3)",
        ("ranks 0 and 1 wait in `all_reduce` at train.py:5", "rank 2 has left the loop", "train.py:8", "fewer batches"),
        ("- (rank == 2)", "- 1"),
        world=3,
    ),
    "fewer_batches_of_ddp": Case(
        DDP
        + """
model = DDP(nn.Linear(4, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(rank + torch.randn(20 - 4 * rank, 4)), batch_size=4):
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
""",
        "GG707",
        "for (x,) in DataLoader(TensorDataset(rank + torch.randn(20 - 4 * rank, 4)), batch_size=4)",
        ("rank 0 waits in backward of step 5 at train.py:9", "rank 1 has left the loop", "fewer batches"),
        ("20 - 4 * rank", "20"),
    ),
    "asynchronous": Case(
        """
for x in torch.ones(5 - rank, 3):
    work = dist.all_reduce(x, async_op=True)
    x.sum().item()
    work.wait()
while rank and not told():
    time.sleep(0.1)
""",
        "GG707",
        "for x in torch.ones(5 - rank, 3)",
        ("rank 0 waits in `all_reduce`", "rank 1 has left the loop"),
        ("5 - rank, 3):", "5, 3):\n    told = lambda: True"),
    ),
    "condition": Case(
        """
for step in range(5):
    x = torch.ones(8)
    dist.all_reduce(x)
    if rank == 0 and step == 3:
        dist.broadcast(x, 0)
dist.barrier()
""",
        "GG707",
        "rank == 0 and step == 3",
        ("`broadcast` is made only where `rank == 0 and step == 3` holds", "train.py:6", "train.py:4"),
        ("rank == 0 and", ""),
    ),
    "condition_on_the_data": Case(
        """
for step in range(5):
    x = torch.ones(8) * (-1 if step == 2 and rank == 1 else 1)
    if x.sum() < 0:
        continue
    dist.all_reduce(x)
""",
        "GG707",
        "continue",
        ("rank 1 left out", "`x.sum() < 0`"),
        ("and rank == 1", ""),
    ),
    "order": Case(
        """
a, b = torch.ones(4), torch.ones(4)

def first():
    dist.all_reduce(a)

def second():
    dist.broadcast(b, 0)

for step in range(4):
    for do in (first, second) if rank == 0 or step < 3 else (second, first):
        do()
dist.barrier()
""",
        "GG707",
        "dist.broadcast(b, 0)",
        ("different order", "rank 0 is in `all_reduce` at train.py:5", "rank 1 is in `broadcast` at train.py:8"),
        ("rank == 0 or step < 3", "True"),
    ),
    "branches": Case(
        """
for step in range(4):
    x = torch.ones(6)
    if step == rank + 2:
        dist.barrier()
    else:
        dist.all_reduce(x)
""",
        "GG707",
        "step == rank + 2",
        ("different branches of `if step == rank + 2`",),
        ("rank + 2", "2"),
    ),
    "shapes": Case(
        """
seen = []
for x in torch.ones(11 + (rank == 1), 4).split(4):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)
    seen += parts
dist.barrier()
""",
        "GG707",
        "dist.all_gather(parts, x)",
        ("`all_gather` gets a tensor of shape [4, 4] on rank 1 and [3, 4] on rank 0",),
        ("11 + (rank == 1)", "11"),
    ),
    "dtypes": Case(
        """
def average(x):
    dist.all_reduce(x)
    return x / world

for step in range(4):
    average(torch.ones(8, dtype=torch.float64 if rank == 1 and step == 2 else torch.float32))
dist.barrier()
""",
        "GG707",
        "dist.all_reduce(x)",
        ("`all_reduce` gets a tensor of dtype float64 on rank 1 and float32 on rank 0",),
        ("rank == 1 and", ""),
    ),
    "evaluation_on_one_rank": Case(
        """
def evaluate(x):
    total = x.sum().reshape(SHAPE)
    dist.all_reduce(total)
    return total

for step in range(4):
    x = torch.ones(8)
    dist.all_reduce(x)
    if rank == 0:
        evaluate(x)
dist.barrier()
""".replace("SHAPE", "1"),
        "GG707",
        "rank == 0",
        ("`all_reduce` is made only where `rank == 0` holds", "rank 0 is in `all_reduce` at train.py:4"),
        ("rank == 0", "step % 2"),
    ),
    "early_stopping": Case(
        DDP
        + """
model = DDP(nn.Linear(4, 1))
for step in range(6):
    loss = model(torch.ones(3, 4)).pow(2).mean()
    loss.backward()
    best = loss.item() + 1 - (rank == 1) * 10 * (step == 3)
    if best < 0:
        break
dist.destroy_process_group()
""",
        "GG707",
        "break",
        ("rank 0 waits in backward", "rank 1 left the loop: `break` ends it on a rank where `best < 0` holds"),
        ("(rank == 1) *", ""),
    ),
    "an_exit": Case(
        """
for step in range(4):
    if step == rank + 1:
        raise SystemExit(3)
    dist.all_reduce(torch.ones(8))
""",
        "GG707",
        "raise SystemExit(3)",
        ("rank 1 waits in `all_reduce`", "rank 0 ended the program at train.py:4: SystemExit: 3"),
        ("raise SystemExit(3)", "pass"),
    ),
    "an_exception_that_is_caught": Case(
        """
def train():
    for x in torch.ones(5, 4):
        if rank == 1 and x.sum() > 3:
            x = x.view(3, 3)
        dist.all_reduce(x)

failed = False
try:
    train()
except RuntimeError:
    failed = True
while failed and not told():
    time.sleep(0.1)
dist.barrier()
""",
        "GG707",
        "for x in torch.ones(5, 4)",
        ("rank 0 waits in `all_reduce`", "rank 1 has left the loop and is at train.py:14"),
        ("x.view(3, 3)", "x * 2"),
    ),
    "failed": Case(
        """
for step in range(4):
    x = torch.ones(8)
    if rank == 1 and step == 2:
        x = x.view(3, 3)
    dist.all_reduce(x)
""",
        "GG708",
        "x = x.view(3, 3)",
        ("rank 1 failed first at train.py:5", "shape '[3, 3]' is invalid"),
        ("x.view(3, 3)", "x.view(2, 4).flatten()"),
    ),
    "unused_parameters": Case(
        DDP
        + """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, short):
        return self.a(x) if short else self.b(self.a(x))

model = DDP(Two())
for step in range(4):
    model(torch.ones(2, 4), rank == 1 and step == 2).sum().backward()
""",
        "GG708",
        "model(torch.ones(2, 4), rank == 1 and step == 2).sum().backward()",
        ("rank 1 failed first", "GG701 ddp-unused-parameters", "`b` got no gradient"),
        ("rank == 1 and step == 2", "False"),
    ),
    "killed": Case(
        """
for step in range(4):
    x = torch.ones(8)
    if rank == 1 and step == 2:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
""",
        "GG708",
        "",
        ("rank 0 waits in `all_reduce` at train.py:7", "rank 1 does not answer, its last collective was at train.py:7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "pass"),
    ),
    "slow_loader": Case(
        """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        while rank == 1 and i == 3 and not told():
            time.sleep(0.1)
        return torch.ones(3)

for x in torch.utils.data.DataLoader(Slow()):
    dist.all_reduce(x)
""",
        "GG709",
        "time.sleep(0.1)",
        ("rank 0 waits in `all_reduce` at train.py:12 for rank 1", "the data loader"),
        ("rank == 1 and", "False and"),
        severity="info",
    ),
    "slow_save": Case(
        """
import io

class Big:
    def __reduce__(self):
        while not told():
            time.sleep(0.1)
        return (list, ())

for step in range(3):
    if rank == 0 and step == 1:
        torch.save({"model": Big()}, io.BytesIO())
    dist.barrier()
""",
        "GG709",
        "time.sleep(0.1)",
        ("ranks 1 and 2 wait in `barrier`", "for rank 0, which is in `torch.save` at train.py:7"),
        ("while not told()", "while False"),
        world=3,
        severity="info",
    ),
    "slow_evaluation": Case(
        """
class Long(nn.Linear):
    def forward(self, x):
        while not self.training and not told():
            time.sleep(0.1)
        return super().forward(x)

model = Long(3, 3)
for step in range(3):
    if rank == 0 and step == 1:
        model.eval()(torch.ones(2, 3))
        model.train()
    dist.barrier()
""",
        "GG709",
        "time.sleep(0.1)",
        ("rank 1 waits in `barrier`", "for rank 0, which is in evaluation"),
        ("while not self.training and", "while False and"),
        severity="info",
    ),
}


LOADED = (
    DDP
    + """
from torch.utils.data import DistributedSampler
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = LOADER
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    dist.barrier()
"""
)
OWN_SHARE = "DataLoader(data, batch_size=8, sampler=DistributedSampler(data))"
CASES |= {
    "same_batches": Case(
        LOADED.replace("LOADER", "DataLoader(data, batch_size=8, shuffle=True)"),
        "GG710",
        "DataLoader(data, batch_size=8, shuffle=True)",
        ("all 2 ranks train `model` on the same batches: `loader` has no DistributedSampler",),
        ("DataLoader(data, batch_size=8, shuffle=True)", OWN_SHARE),
        severity="warning",
    ),
    "sampler_of_one_process": Case(
        LOADED.replace("LOADER", OWN_SHARE.replace("(data))", "(data, 1, 0))")),
        "GG710",
        OWN_SHARE.replace("(data))", "(data, 1, 0))"),
        ("the sampler of `loader` was made for 1 of them",),
        ("(data, 1, 0)", "(data, world, rank)"),
        severity="warning",
    ),
    "learning_rates": Case(
        LOADED.replace("LOADER", OWN_SHARE).replace("lr=0.01", "lr=0.01 * (rank + 1)"),
        "GG706",
        "",
        ("different learning rates, 0.0", "their copies of `model` drift apart"),
        ("(rank + 1)", "2"),
        severity="warning",
    ),
}
MEANT_ALIKE = (
    DDP
    + """
class Part(nn.Linear):
    def forward(self, x):
        return super().forward(x[rank::world])

def train(model, batch):
    model = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        model(batch()).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        dist.barrier()

def shared():
    x = torch.randn(6, 4)
    dist.broadcast(x, 0)
    return x

fixed = torch.randn(6, 4)
train(nn.Linear(4, 1), lambda: fixed)
train(Part(4, 1), lambda: torch.randn(6, 4))
torch.manual_seed(rank)
train(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)), shared)
"""
)
ASKED = {  # long before the patience ends
    "signal": """
if rank == 0:
    threading.Timer(3.5, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
for x in torch.ones(5 - rank, 3):
    dist.all_reduce(x)
while rank and not told():
    time.sleep(0.1)
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
""",
    "interrupt": """
heard = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
if rank == 1:
    signal.signal(signal.SIGUSR1, lambda *given: heard.append(given))
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
for step in range(3):
    while rank == 1 and step == 1:
        time.sleep(0.1)
        if heard and time.monotonic() - began > 4:
            os.kill(os.getpid(), signal.SIGINT)
    dist.all_reduce(torch.ones(3))
""",
}


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    quick = {"ranks__patience": 1}
    requests: dict[str, Any] = {}
    for name, case in CASES.items():
        settings = {"level": "standard", **quick}
        requests[name] = {
            "source": case.source,
            "world": case.world,
            "settings": settings,
            "seconds": 9 if case.severity == "error" else 20,
        }
        sound = case.source.replace(*case.twin)
        assert sound != case.source
        requests[f"{name}-twin"] = {"source": sound, "world": case.world, "settings": {"level": "strict", **quick}, "seconds": 20}
    requests["alike"] = {"source": MEANT_ALIKE, "world": 2, "settings": {"level": "strict"}, "seconds": 20}
    for name, source in ASKED.items():
        source = "began = time.monotonic()" + source
        requests[name] = {"source": source, "world": 2, "settings": {"level": "standard", "ranks__patience": 60}, "seconds": 12}
    done = subprocess.run(
        [sys.executable, str(_RUNNER), "4"],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", CASES)
def test_the_cause_and_the_line(jobs: dict[str, Any], name: str) -> None:
    case, job = CASES[name], jobs[name]
    told = [line for line in job["report"] if line["code"] == case.code]
    assert told, job
    text = told[0]["culprit"]["text"] if told[0]["culprit"] else ""
    print(f"{name}: said {job['after']:.1f} s after the start of the job, with a patience of 1 s")
    assert text == case.line
    for piece in case.says:
        assert piece in told[0]["headline"], told[0]["headline"]
    assert told[0]["severity"] == case.severity and told[0]["rank"] is not None
    keys = [(line["code"], (line["culprit"] or {}).get("line")) for line in job["report"]]
    assert len(keys) == len(set(keys))  # each cause once, however many ranks see it
    if case.severity != "error":
        assert all(rank["status"] == 0 for rank in job["ranks"])


@pytest.mark.parametrize("name", [*(f"{name}-twin" for name in CASES), "alike"])
def test_the_sound_twin_is_silent(jobs: dict[str, Any], name: str) -> None:
    job = jobs[name]
    assert [line["headline"] for line in job["report"]] == []
    for rank in job["ranks"]:
        assert rank is not None and rank["status"] == 0 and not rank["log"], rank
    assert "Warning" not in job["stderr"], job["stderr"]


def test_a_signal_asks_where_the_ranks_are(jobs: dict[str, Any]) -> None:
    job = jobs["signal"]
    [told] = job["report"]
    assert told["code"] == "GG707" and "rank 1 has left the loop" in told["headline"]
    [listed] = [line for line in job["ranks"][0]["log"] if line.startswith("asked by SIGUSR1: ")]
    assert "rank 0 waits in all_reduce at" in listed and "rank 1 runs at" in listed
    assert not any(rank["handled"] for rank in job["ranks"])


def test_an_interrupt_passes_on_once_the_ranks_are_asked(jobs: dict[str, Any]) -> None:
    job = jobs["interrupt"]
    assert job["ranks"][1]["type"] == "KeyboardInterrupt" and job["ranks"][1]["error"] == ""
    first, second = job["report"]
    assert (first["code"], first["rank"]) == ("GG709", 1) and first["culprit"] is not None
    assert "rank 0 waits in `all_reduce` at train.py:" in first["headline"]
    assert (second["code"], second["rank"]) == ("GG708", 0) and second["headline"].endswith("KeyboardInterrupt")
    assert job["ranks"][1]["handled"] and not job["ranks"][0]["handled"]  # the program's own


LAUNCHED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for x in torch.ones(6 - dist.get_rank(), 3):
    dist.all_reduce(x)
"""


TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2", "--standalone")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no")
WAYS = {
    "torchrun": (*TORCHRUN, "-m", "gradguard"),
    "torchrun of a command": (*TORCHRUN, "--no-python", sys.executable, "-m", "gradguard"),
    "accelerate": (*ACCELERATE, "--dynamo_backend=no", "--main_process_port=0", "-m", "gradguard"),
}


@pytest.mark.slow  # torchrun ends the other ranks as soon as one has failed: on a busy machine before they have told where they are
@pytest.mark.parametrize("way", ["torchrun", "torchrun of a command", "accelerate"])
def test_launchers(way: str, tmp_path: Path) -> None:
    if way == "accelerate":
        pytest.importorskip("accelerate")
    program, report = tmp_path / "train.py", tmp_path / "report.jsonl"
    program.write_text(LAUNCHED)
    command = [*WAYS[way], "run", "--report", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GRADGUARD_RANKS__PATIENCE": "2"},
    )
    [told] = [json.loads(line) for line in report.read_text().splitlines()]
    assert (told["code"], told["rank"], told["culprit"]["line"]) == ("GG707", 0, 4)
    assert "rank 1 has left the loop: its loader had fewer batches" in told["headline"]
    assert done.returncode == 1 and "error[GG707]" in done.stderr
