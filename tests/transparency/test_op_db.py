"""Every differentiable operator of PyTorch's own catalogue gives bit-identical results under the guard.

Forward and backward of each float32 sample run once bare and once in a traced step, from the same seed. Samples that bare
PyTorch itself cannot run twice alike (uninitialised memory) are left out, as are those it refuses. The catalogue is
`torch.testing._internal.common_methods_invocations.op_db`.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch

from gradguard import gradguard

pytest.importorskip("expecttest")
common = pytest.importorskip("torch.testing._internal.common_methods_invocations")

SAMPLES = 3  # of one operator; the first ones are the plain ones
SECONDS = 2.0  # for one operator
SHARDS = 8
FEWEST = 400  # operators that must have been compared; a smaller number means that the sweep itself broke


def _shards() -> list[list[Any]]:
    ops = [op for op in common.op_db if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")]
    return [ops[i::SHARDS] for i in range(SHARDS)]


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return []


def _outcome(op: Any, sample: Any) -> list[torch.Tensor] | None:
    """Outputs and gradients of one sample; None where it cannot be run."""
    torch.manual_seed(7)
    inputs = [leaf for leaf in _leaves([sample.input, sample.args, sample.kwargs]) if leaf.requires_grad]
    for leaf in inputs:
        leaf.grad = None
    try:
        result = op(sample.input, *sample.args, **sample.kwargs)
        outputs = [out for out in _leaves(result) if out.requires_grad and out.layout == torch.strided]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    except Exception as error:
        return [torch.tensor(hash(type(error)) % 1_000_003)]
    return [out.detach().clone() for out in _leaves(result)] + [leaf.grad.clone() for leaf in inputs if leaf.grad is not None]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaNs compare equal and half-precision complex numbers compare at all."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty(dense.shape, dtype=dense.dtype).copy_(dense).reshape(-1).view(torch.uint8)


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
            return False
        if a.layout == torch.strided and not torch.equal(_bits(a), _bits(b)):
            return False
    return True


_compared: list[str] = []


@pytest.mark.parametrize("shard", [pytest.param(each, marks=pytest.mark.slow) if each % 2 else each for each in range(SHARDS)])
def test_operators_give_identical_results(shard: int) -> None:
    differing = []
    compared = 0
    for op in _shards()[shard]:
        start = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.manual_seed(3)
                samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))[:SAMPLES]
            except Exception:
                continue  # needs a library that is not installed
            told = False
            for sample in samples:
                bare = _outcome(op, sample)
                again = _outcome(op, sample)
                if not _same(bare or [], again or []):
                    continue
                with gradguard(level="strict", actions={"silent": "off"}):
                    guarded = _outcome(op, sample)
                if not _same(bare or [], guarded or []):
                    differing.append(f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}")
                if not told:
                    told = True
                    compared += 1
                if time.monotonic() - start > SECONDS:
                    break
    print(f"shard {shard}: {compared} operators compared")
    assert not differing
    assert compared >= FEWEST // SHARDS
