"""Exceptions that say that memory could not be had: they stay what they are, and only what leaves the guard is told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gradguard import gradguard
from gradguard.analysis.memory.allocations import Allocation
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError
from gradguard.instrumentation import refusals
from tests.running import run_source, said

CUDA = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 39.39 GiB of which 2.00 GiB is free. "
    "Process 123 has {others} GiB memory in use. Including non-PyTorch memory, this process has {ours} GiB memory in use. "
    "Of the allocated memory 6.00 GiB is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes."


def _raising(text: str, where: str = "forward") -> str:
    return f"""
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if {where!r} == "forward":
            raise torch.OutOfMemoryError({text!r})
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError({text!r})

w = torch.ones(3, requires_grad=True)
Layer.apply(w).sum().backward()
"""


@pytest.mark.parametrize("level", ["watch", "standard", "forensic"])
def test_other_processes_on_the_accelerator(level: str, tmp_path: Path) -> None:
    text = CUDA.format(asked="3.00 GiB", others="30.39", ours="7.00", unused="500.00 MiB")
    (found,) = said(tmp_path, _raising(text), level)
    assert found.code == "GG806"
    assert "other processes have 30.4 GiB of the device's 39.4 GiB, this one 7.0 GiB" in found.headline
    assert any("6.0 GiB is held by tensors, and 500 MiB is reserved by its allocator but unused" in note for note in found.notes)


def test_what_the_allocator_has_unused(tmp_path: Path) -> None:
    (found,) = said(tmp_path, _raising(CUDA.format(asked="512.00 MiB", others="1.00", ours="36.39", unused="9.00 GiB")))
    assert "allocator has 9.0 GiB reserved and unused" in found.headline
    assert "expandable_segments" in found.fixes[0].title


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_type_and_text_stay(where: str, tmp_path: Path) -> None:
    text = CUDA.format(asked="512.00 MiB", others="1.00", ours="36.39", unused="9.00 MiB")
    ((diagnosis, shown),) = run_source(tmp_path, "import torch\n" + _raising(text, where), "strict")
    assert diagnosis.code == "GG806"
    path = tmp_path / "again.py"
    path.write_text("import torch\n" + _raising(text, where))
    with pytest.raises(torch.OutOfMemoryError) as caught, gradguard(level="strict"):
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "again"})
    assert isinstance(caught.value, GradGuardError)
    assert len(caught.value.args) == 1  # what accelerate and Lightning look at
    assert "CUDA out of memory." in caught.value.args[0]
    assert type(caught.value.__cause__) is torch.OutOfMemoryError
    assert str(caught.value.__cause__) == text
    assert shown


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError", "RuntimeError", "MemoryError"])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_who_catches_it_gets_it_as_it_is(where: str, error: str, tmp_path: Path) -> None:
    source = f"""
made = {error}({CPU!r})
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if {where!r} == "forward":
            raise made
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        if {where!r} == "backward":
            raise made
        return grad

class Own(torch.optim.SGD):
    def step(self, closure=None):
        raise made

w = torch.ones(3, requires_grad=True)
opt = (Own if {where!r} == "step" else torch.optim.SGD)([w], lr=0.1)
for batch in (8, 4):
    try:
        Layer.apply(w).sum().backward()
        opt.step()
        raise AssertionError("not reached")
    except {error} as caught:
        assert caught is made and type(caught) is {error} and caught.args == ({CPU!r},)
        import pickle
        assert str(pickle.loads(pickle.dumps(caught))) == str(made)
"""
    assert said(tmp_path, source, "strict") == []


def test_an_operator_of_torch_that_raises_leaves_nothing_on_the_exception(tmp_path: Path) -> None:
    source = """
x = torch.randn(4, requires_grad=True)
try:
    y = x.view(-1, 1) * torch.empty(1, 1 << 48)
except RuntimeError as error:
    import pickle
    assert error.__dict__ == {} and type(pickle.loads(pickle.dumps(error))) is RuntimeError, error
(x * 2).sum().backward()
"""
    assert said(tmp_path, source) == []


def test_arrays_of_numpy(tmp_path: Path) -> None:
    source = """
import numpy as np
def load(n):
    return np.empty((n, 1 << 20, 1 << 20), dtype=np.float32)
load(64)
"""
    ((diagnosis, shown),) = run_source(tmp_path, "import torch\n" + source)
    assert (diagnosis.code, diagnosis.culprit and diagnosis.culprit.text) == ("GG806", "np.empty((n, 1 << 20, 1 << 20), dtype=np.float32)")
    assert "one array of 262144 GiB is asked for, and not by PyTorch" in diagnosis.headline
    assert "GG806" in shown


@pytest.mark.parametrize(
    "source",
    [
        'raise MemoryError("my own budget is spent")',
        "def take(n):\n    if n > 3:\n        raise MemoryError\n\ntake(4)",
    ],
)
def test_what_the_program_raises_itself_means_what_it_likes(source: str, tmp_path: Path) -> None:
    with pytest.raises(MemoryError) as caught:
        said(tmp_path, source)
    assert type(caught.value) is MemoryError


_WORKER = """
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return bytearray(1 << 60)
for batch in DataLoader(Data(), num_workers=1):
    pass
"""


def test_a_worker_of_a_data_loader(tmp_path: Path) -> None:
    (found,) = said(tmp_path, _WORKER)
    assert found.code == "GG806"
    assert "a worker process of a DataLoader could not get memory" in found.headline


def test_a_second_failure_costs_the_diagnosis_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spent(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("gradguard.analysis.memory.allocations.account", spent)
    text = CUDA.format(asked="512.00 MiB", others="1.00", ours="36.39", unused="9.00 MiB")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        said(tmp_path, _raising(text))
    assert type(caught.value) is torch.OutOfMemoryError


def test_in_a_thread_of_its_own(tmp_path: Path) -> None:
    text = CUDA.format(asked="512.00 MiB", others="1.00", ours="36.39", unused="9.00 GiB")
    found: list[Diagnosis] = []
    thread = threading.Thread(target=lambda: found.extend(said(tmp_path, _raising(text))))
    thread.start()
    thread.join()
    assert [each.code for each in found] == ["GG806"]


def test_the_reserve_is_there_again(tmp_path: Path) -> None:
    said(tmp_path, _raising(CUDA.format(asked="512.00 MiB", others="1.00", ours="36.39", unused="9.00 GiB")))
    assert refusals.reserve._held is not None or not hasattr(refusals.mmap, "MAP_PRIVATE")


_LEFT = """
left = []
for i in range(6):
    x = torch.randn(256, 256, requires_grad=True)
    left.append(torch.sigmoid(torch.sigmoid(x @ x) @ x))
"""


@pytest.mark.parametrize("level", ["standard", "forensic"])
def test_graphs_on_the_processor_do_not_fill_an_accelerator(level: str, tmp_path: Path) -> None:
    text = CUDA.format(asked="512.00 MiB", others="1.00", ours="36.39", unused="9.00 MiB")
    (found,) = said(tmp_path, _LEFT + _raising(text), level)
    assert found.code == "GG806"
    assert not any("saved for backward" in note for note in found.notes)


def test_what_the_program_raises_itself_is_not_explained_by_the_graphs_it_keeps(tmp_path: Path) -> None:
    with pytest.raises(MemoryError) as caught:
        said(tmp_path, _LEFT + 'raise MemoryError("my own budget is spent")')
    assert type(caught.value) is MemoryError


def test_a_worker_of_a_data_loader_while_graphs_are_kept(tmp_path: Path) -> None:
    (found,) = said(tmp_path, _LEFT + _WORKER)
    assert (found.code, "worker process" in found.headline) == ("GG806", True)


@pytest.mark.parametrize("has", [200 << 20, 4 << 30])
def test_graphs_that_are_a_small_part_of_the_process(has: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some MiB of graphs do not fill a process of 4 GiB."""
    monkeypatch.setattr(Allocation, "process", has)
    (found,) = said(tmp_path, _LEFT + f"def more():\n    raise RuntimeError({CPU!r})\nmore()")
    assert found.code == ("GG806" if has > 1 << 30 else "GG802")
