"""What the ranks put into the job's store: how much, and that a rank that dies in the middle of it costs the others nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gradguard.monitors import rank_exchange
from gradguard.monitors.rank_exchange import Exchange
from gradguard.monitors.rank_positions import MOST_BYTES, Past, Place, Position


class Store:
    """Keys of one process, and how many bytes went there and back."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.bytes = 0

    def set(self, key: str, value: str) -> None:
        self.bytes += len(key) + len(value)
        self.held[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.bytes += sum(map(len, keys)) + 1
        return all(key in self.held for key in keys)

    def get(self, key: str) -> bytes:
        self.bytes += len(key) + len(self.held[key])
        return self.held[key]


def position(rank: int, depth: int = 4) -> Position:
    file = f"/home/someone/a/project/with/long/names/package_{'x' * 40}/train.py"
    stack = tuple(Place(f"{file}{i}", 100 + i, "Trainer.training_step") for i in range(depth))
    past = tuple(Past("0", 400 + i, "reduce_scatter_tensor", (4096, 4096), "bfloat16", file, 88) for i in range(8))
    return Position(rank, "waits", "all_reduce", "0", 412, (4096,), "float32", 31.4, 412, stack, past, {str(i): i for i in range(40)})


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_position_is_small_and_comes_back_as_it_was(depth: int) -> None:
    sent = position(3, depth)
    text = sent.packed()
    assert len(text.encode()) < MOST_BYTES
    got = Position.unpacked(text)
    assert (got.rank, got.state, got.group, got.number, got.shape, got.place) == (3, "waits", "0", 412, (4096,), sent.place)
    assert got.past == sent.past[len(sent.past) - len(got.past) :] and len(got.past) >= 2


def test_512_ranks_stay_below_a_kibibyte_a_rank_and_a_second() -> None:
    world, seconds = 512, 10  # a second look of every rank each second, and two rounds of questions meanwhile
    store = Store()
    ranks = [Exchange(store, rank, world) for rank in range(world)]
    for each in ranks:
        each.begin()
    for second in range(seconds):
        if second in (2, 6):
            for rank, each in enumerate(ranks[1:], 1):  # they answer as soon as they are asked; here, right before
                store.set(f"gradguard/ranks/0/at/{ranks[0].round}/{rank}", position(rank).packed())
                each.round += 1
            found = ranks[0].gather(position(0))
            assert len(found) == world
        for each in ranks:
            assert not each.asked()
    assert store.bytes / world / seconds < 1024
    assert sum(map(len, store.held.values())) / world < 2 * 1024 + 16


def test_who_does_not_answer_is_gone_and_who_never_said_it_would_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_exchange, "ANSWERS", 0.05)
    monkeypatch.setattr(rank_exchange, "_POLL", 0.01)
    store = Store()
    first, second, third = (Exchange(store, rank, 5) for rank in range(3))
    Exchange(store, 4, 5).begin()  # answers never; rank 3 has no guard
    for each in (first, second, third):
        each.begin()
    third.end(Position(2, "failed", error="ValueError: no"))

    def answer() -> None:
        for _ in range(2):  # who does not answer is asked again
            while not second.asked():
                pass
            second.answer(position(1))

    thread = threading.Thread(target=answer)
    thread.start()
    found: dict[int, Any] = first.gather(position(0))
    thread.join()
    assert {rank: each.state for rank, each in found.items()} == {0: "waits", 1: "waits", 2: "failed", 4: "gone"}


def test_a_rank_that_asks_answers_another_that_asks_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    pair = [Exchange(store, rank, 2) for rank in range(2)]
    for each in pair:
        each.begin()
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: pair[i].gather(position(i))})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sorted(each) == [0, 1] and {position.state for position in each.values()} == {"waits"} for each in found.values())
