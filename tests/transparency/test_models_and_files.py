"""Copying, pickling, saving and loading of models and tensors; state dicts, moves and casts, under the guard."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gradguard
from gradguard import GradGuardError
from tests.transparency.helpers import assert_transparent, grads, guarding
from tests.transparency.workloads import WORKLOADS, conv


def test_pickling_and_copying_models() -> None:
    def program() -> Any:
        training = conv()
        training.step()
        twin = copy.deepcopy(training.model)
        again = pickle.loads(pickle.dumps(training.model))
        shallow = copy.copy(training.model)
        for model in (twin, again, shallow):
            model(training.batch()[0]).sum().backward()
        return [list(model.parameters()) + grads(*model.parameters()) for model in (twin, again)], type(
            pickle.loads(pickle.dumps(torch.ones(2)))
        )

    assert_transparent(program)


def test_saving_and_loading() -> None:
    def program() -> Any:
        training = conv()
        training.step()
        buffer = io.BytesIO()
        torch.save(
            {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "rng": torch.get_rng_state()}, buffer
        )
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        other = conv()
        other.model.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        other.step()
        whole = io.BytesIO()
        torch.save(other.model, whole)
        whole.seek(0)
        return other.state(), list(torch.load(whole, weights_only=False).parameters()), list(state["model"])

    assert_transparent(program)


def test_what_is_pickled_under_the_guard_loads_without_gradguard(level: str) -> None:
    training = WORKLOADS["transformer"]()
    with guarding(level, training.model, training.optimizer):
        training.step()
        blob = pickle.dumps((training.model, training.optimizer))
    assert b"gradguard" not in blob


def test_moves_casts_and_in_place_initialisation() -> None:
    def program() -> Any:
        net = nn.Linear(3, 3)
        nn.init.kaiming_normal_(net.weight)
        nn.init.zeros_(net.bias)
        double = copy.deepcopy(net).double()
        double(torch.ones(1, 3, dtype=torch.double)).sum().backward()
        half = copy.deepcopy(net).to(torch.bfloat16)
        half(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        meta = copy.deepcopy(net).to("meta").to_empty(device="cpu")
        net.register_buffer("extra", torch.ones(2))
        net.requires_grad_(False).requires_grad_(True)
        net.apply(lambda module: None)
        shared = net.share_memory()
        return (
            grads(*double.parameters(), *half.parameters()),
            len(list(meta.parameters())),
            shared.weight.is_shared(),
            list(net.state_dict()),
        )

    assert_transparent(program)


def test_weight_tying_lazy_modules_and_data_assignment() -> None:
    def program() -> Any:
        embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        head.weight = embedding.weight
        lazy = nn.LazyLinear(4)
        lazy(torch.ones(1, 4))
        optimizer = torch.optim.SGD([*embedding.parameters(), *lazy.parameters()], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            head(lazy(embedding(torch.tensor([1, 2])))).pow(2).mean().backward()
            optimizer.step()
        embedding.weight.data = torch.ones(5, 4)
        embedding.weight.data.copy_(torch.zeros(5, 4))
        return embedding.weight, grads(embedding.weight, *lazy.parameters()), head.weight is embedding.weight

    assert_transparent(program)


def test_a_diagnosis_can_be_pickled(level: str) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.sigmoid()
    y.mul_(2)
    try:
        with guarding(level):
            y.sum().backward()
    except GradGuardError as error:
        again = pickle.loads(pickle.dumps(error))
        assert again.diagnosis == error.diagnosis
        assert str(again) == str(error)
        copy.copy(error)
    else:
        raise AssertionError("nothing was raised")


def test_printing_and_comparing_tensors() -> None:
    def program() -> Any:
        x = torch.randn(3, requires_grad=True)
        y = x * 2
        return (
            repr(x),
            str(y),
            f"{y.sum().item():.4f}",
            (x == y).tolist(),
            bool((x == x).all()),
            x in [x],
            hash(x) == id(x),
            y.grad_fn.name(),
            [float(v.detach()) for v in y],
            torch.equal(x, x),
            torch.allclose(x, y),
        )

    assert_transparent(program)


def test_the_tracer_of_torchscript_finds_no_frame_of_gradguards(level: str) -> None:
    """It writes the stack of each operator into what it makes."""
    package = os.path.dirname(gradguard.__file__)
    files: list[str] = []

    def note(grad: torch.Tensor) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back

    def force(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        z = y * 2
        z.register_hook(note)
        with torch.enable_grad():
            torch.autograd.grad(F.silu(z).sum(), [y])
        return x.sin()

    with guarding(level):
        torch.ones(2, requires_grad=True).sum().backward()
        torch.jit.trace(force, (torch.ones(2),), check_trace=False)
    assert any(file.endswith("graph.py") for file in files)
    assert not [file for file in files if file.startswith(package)]
