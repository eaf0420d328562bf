"""The user's own function modes, dispatch modes and default devices, inside and outside; and the native fast paths."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradguard import gradguard
from gradguard.runtime.session import current_session
from gradguard.torch_compat.private_api import mode_is_active
from tests.transparency.helpers import assert_transparent, bits, fresh_settings, grads, guarding, stack_length


class Recorder(TorchFunctionMode):
    """Notes every torch function; what it sees must not change under the guard."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", "?"))
        return func(*args, **(kwargs or {}))


class Doubler(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.sin else out


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _work() -> Any:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 3, requires_grad=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (net(x) + torch.sin(x).sum()).mean()
        loss.backward()
        optimizer.step()
    return grads(x, *net.parameters())


@pytest.mark.parametrize("mode", [Recorder, Doubler, Dispatched])
def test_a_mode_of_the_users_inside(mode: Any) -> None:
    def program() -> Any:
        with mode() as own:
            result = _work()
        return result, getattr(own, "seen", [])

    assert_transparent(program)


@pytest.mark.parametrize("mode", [Recorder, Dispatched])
def test_looking_at_numpy_memory_is_not_seen_by_the_users_modes(mode: Any) -> None:
    def program() -> Any:
        scale = torch.ones(3)
        array = scale.numpy()
        x = torch.randn(3, requires_grad=True)
        with mode() as own:
            y = (x * scale * torch.from_numpy(array.copy())).exp()
            y.detach().numpy()
            (y * scale).sum().backward()
        return grads(x), own.seen

    assert_transparent(program)


@pytest.mark.parametrize("mode", [Recorder, Doubler, Dispatched])
def test_a_mode_of_the_users_outside(mode: Any, level: str) -> None:
    found = []
    for around in (None, guarding(level)):
        torch.manual_seed(2)
        with mode() as own:
            before = stack_length()
            if around is None:
                result = _work()
            else:
                with around:
                    result = _work()
            assert stack_length() == before
        found.append(([bits(t) for t in result], getattr(own, "seen", [])))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]


def test_a_mode_that_is_left_after_the_guard_was_entered(level: str) -> None:
    mode = Recorder()
    mode.__enter__()
    guard = guarding(level)
    with guard:
        torch.ones(2).sin()
        mode.__exit__(None, None, None)
        assert "sin" in mode.seen
        count = len(mode.seen)
        torch.ones(2).sin()
        assert len(mode.seen) == count
    assert stack_length() == 0


def test_a_mode_that_outlives_the_guard(level: str) -> None:
    mode = Recorder()
    with guarding(level):
        mode.__enter__()
        torch.ones(2).sin()
    assert stack_length() == 1
    mode.__exit__(None, None, None)
    assert stack_length() == 0


def test_the_users_mode_is_asked_first(level: str) -> None:
    """A mode that raises keeps the guard out of it; the stack is whole afterwards."""

    class Refuses(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise KeyError("no torch today")

    with guarding(level):
        before = stack_length()
        with pytest.raises(KeyError), Refuses():
            torch.ones(2)
        assert stack_length() == before


def test_default_device_inside() -> None:
    def program() -> Any:
        torch.set_default_device("meta")
        try:
            inside = torch.ones(2).device.type
        finally:
            torch.set_default_device(None)
        with torch.device("meta"):
            nested = nn.Linear(2, 2).weight.device.type
            with torch.device("cpu"):
                deeper = torch.ones(2).device.type
        return inside, nested, deeper, torch.ones(2).device.type, _work()

    assert_transparent(program)


def test_default_device_outside(level: str) -> None:
    with torch.device("meta"):
        with guarding(level):
            assert torch.ones(2).device.type == "meta"
            with torch.device("cpu"):
                assert torch.ones(2).device.type == "cpu"
                x = torch.ones(2, requires_grad=True)
                x.sin().sum().backward()
            assert torch.ones(2).device.type == "meta"
        assert torch.ones(2).device.type == "meta"
    assert torch.ones(2).device.type == "cpu"
    torch.set_default_device("cpu")
    try:
        with guarding(level):
            torch.set_default_device("meta")
            assert torch.ones(2).device.type == "meta"
            torch.set_default_device(None)
    finally:
        torch.set_default_device(None)


def test_default_device_changed_across_the_guards_edges(level: str) -> None:
    context = torch.device("meta")
    guard = guarding(level)
    guard.__enter__()
    context.__enter__()
    guard.__exit__(None, None, None)
    assert torch.ones(2).device.type == "meta"
    context.__exit__(None, None, None)
    context = torch.device("meta")
    context.__enter__()
    guard.__enter__()
    context.__exit__(None, None, None)
    assert torch.ones(2).device.type == "cpu"
    guard.__exit__(None, None, None)
    assert stack_length() == 0


def test_disabled_torch_functions_inside(level: str) -> None:
    with guarding(level):
        with torch._C.DisableTorchFunction():
            assert torch.ones(2, requires_grad=True).sin().requires_grad
        with torch._C.DisableTorchFunctionSubclass():
            torch.ones(2, requires_grad=True).sin().sum().backward()


@contextmanager
def _counting_fast_path() -> Any:
    """Counts calls of the native encoder layer."""
    calls = [0]
    name = "_transformer_encoder_layer_fwd"
    original = getattr(torch, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    setattr(torch, name, counted)
    try:
        yield calls
    finally:
        setattr(torch, name, original)


def _encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_encoders_fast_path_is_kept(mode: Any, level: str) -> None:
    encoder = _encoder()
    x = torch.randn(3, 5, 16)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    with mode(), _counting_fast_path() as calls:
        bare = bits(encoder(x)), bits(encoder(x, src_key_padding_mask=mask))
        taken = calls[0]
        assert taken == 4, "this torch has no such fast path any more"
        with guarding(level):
            guarded = bits(encoder(x)), bits(encoder(x, src_key_padding_mask=mask))
        assert calls[0] == 2 * taken
    assert guarded == bare


def test_attentions_fast_path_is_kept(level: str) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        bare = [bits(t) for t in attention(x, x, x)]
        with guarding(level):
            assert [bits(t) for t in attention(x, x, x)] == bare


def test_a_mode_of_the_users_still_turns_the_fast_path_off(level: str) -> None:
    encoder = _encoder()
    x = torch.randn(3, 5, 16)
    with torch.no_grad(), _counting_fast_path() as calls:
        with Recorder():
            bare = bits(encoder(x))
        assert calls[0] == 0
        with guarding(level), Recorder():
            guarded = bits(encoder(x))
        with Recorder(), guarding(level):
            outside = bits(encoder(x))
        assert calls[0] == 0
    assert bare == guarded == outside


def test_the_stack_is_whole_after_trouble_in_the_middle(level: str) -> None:
    settings = fresh_settings(level)

    class Boom(Exception):
        pass

    def hook(grad: torch.Tensor) -> torch.Tensor:
        raise Boom

    for spoil in ("forward", "hook", "step", "closure"):
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises((Boom, RuntimeError, TypeError)):
            with gradguard(settings=settings):
                inside = stack_length()
                try:
                    out = net(torch.ones(1, 2))
                    if spoil == "forward":
                        out @ torch.ones(5, 5)
                    if spoil == "hook":
                        out.register_hook(hook)
                    out.sum().backward()
                    if spoil == "step":
                        net.weight.grad = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), torch.ones(1), (2, 2))
                        optimizer.param_groups[0]["foreach"] = "nonsense"
                        optimizer.param_groups[0]["lr"] = Boom
                        optimizer.step()
                    if spoil == "closure":

                        def closure() -> torch.Tensor:
                            raise Boom

                        optimizer.step(closure)
                finally:
                    if spoil != "step":
                        assert stack_length() == inside
        assert stack_length() == 0


def test_the_probe_comes_back_after_a_step_that_raised() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with guarding("strict"):
        assert stack_length() == 1
        net(torch.ones(1, 2)).sum().backward()
        optimizer.param_groups[0]["lr"] = object()
        with pytest.raises((TypeError, AttributeError)):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert stack_length() == 1
        session = current_session()
        assert session is not None
        assert mode_is_active(session.ops.probe)


def test_no_mode_stands_in_steps_that_are_not_traced() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    with guarding("watch"):
        seen.append(stack_length())
    with guarding("standard"):
        for _ in range(9):
            seen.append(stack_length())
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert seen[:4] == [0, 1, 1, 1]
    assert seen[-1] == 0  # a new optimizer, or a first step of another size, may have been looked at a little longer


@pytest.mark.parametrize("level", ["standard", "strict", "watch", "forensic"])
def test_who_counts_the_function_modes_counts_the_users_alone(level: str) -> None:
    """Before, within and after a step, whether or not the step is traced; a count that was 0 at the start is 0 at the end."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    asked = torch._C._len_torch_function_stack
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode, counts, lowest = Mode(), [], []
    with gradguard(level=level):
        for _ in range(3):
            counts.append(torch._C._len_torch_function_stack())
            with mode:
                loss = model(torch.randn(4, 3)).square().mean()
                counts.append(torch._C._len_torch_function_stack())
                lowest.append(torch._C._get_function_stack_at(0))
                assert torch.overrides._get_current_function_mode_stack() == [mode]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counts == [0, 1] * 3
    assert lowest == [mode] * 3
    assert torch._C._len_torch_function_stack is asked
    assert torch._C._len_torch_function_stack() == 0
