"""Old graphs in lists: taken out by a loop, put in by a hook, replaced in one place of several."""

from __future__ import annotations

from pathlib import Path

from tests.running import applied, only, said

PAIRS = """
def run():
    lift, net = nn.Conv1d(1, 3, 1), nn.Conv1d(3, 1, 3, padding=1)
    opt = torch.optim.SGD([*lift.parameters(), *net.parameters()], lr=0.1)
    pairs = [(LIFTED, wave) for wave in torch.randn(2, 4, 1, 8)]
    for epoch in range(2):
        for x, wave in pairs:
            loss = F.mse_loss(net(USED), wave)
            opt.zero_grad()
            loss.backward()
            opt.step()
run()
"""

CAPTURED = """
class Style:
    def __init__(self, net):
        self.seen = []
        net[1].register_forward_hook(self.capture)
        self.net = net

    def capture(self, module, args, output):
        self.seen.append(output)

    def __call__(self, x):
        BEGIN
        self.net(x)
        return sum(part.square().mean() for part in self.seen)

net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
style, maker = Style(net), nn.Linear(4, 4)
opt = torch.optim.SGD(maker.parameters(), lr=0.1)
for _ in range(3):
    loss = style(maker(torch.randn(8, 4)))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

PRIORITIES = """
class Replay:
    def __init__(self):
        self.weights = []

    def push(self):
        self.weights.append(max(self.weights, default=torch.tensor(1.0)))

    def update(self, chosen, errors):
        for i, error in zip(chosen, errors):
            self.weights[i] = error.abs() + 1e-3

replay, net = Replay(), nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    replay.push()
    errors = net(torch.randn(len(replay.weights), 3)).tanh().squeeze(1)
    loss = (torch.stack(replay.weights) * errors.square()).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    replay.update(range(len(errors)), ERRORS)
"""

AVERAGED = """
class Average:
    def __init__(self, model):
        self.mean = nn.Linear(3, 3).requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for a, p in zip(self.mean.parameters(), model.parameters()):
            a.lerp_(p, 0.1)

    @torch.no_grad()
    def load_into(self, model):
        for p, a in zip(model.parameters(), self.mean.parameters()):
            p.copy_(a)

model = nn.Linear(3, 3)
average, opt = Average(model), torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(model(torch.randn(4, 3)).tanh()).square().mean()
    if step == 1:
        average.load_into(model)
    opt.zero_grad()
    loss.backward()
    opt.step()
    average.update(model)
"""


def test_what_a_loop_takes_out_of_a_list_was_computed_when_the_list_was_made(tmp_path: Path) -> None:
    culprit = "pairs = [(lift(wave), wave) for wave in torch.randn(2, 4, 1, 8)]"
    diagnosis = only(tmp_path, PAIRS.replace("LIFTED", "lift(wave)").replace("USED", "x"), "GG205", culprit, "watch")
    assert "`pairs`" in diagnosis.headline and "has changed the weights" in diagnosis.headline
    assert not said(tmp_path, PAIRS.replace("LIFTED", "wave.clone()").replace("USED", "lift(x)"), "watch")


def test_a_list_that_a_hook_fills_is_to_be_emptied_before_each_forward_pass(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, CAPTURED.replace("BEGIN", "pass"), "GG203", "self.seen.append(output)", "watch")
    assert "self.seen.clear()" in diagnosis.fixes[0].title
    assert not said(tmp_path, CAPTURED.replace("BEGIN", "self.seen.clear()"), "watch")


def test_of_several_places_that_fill_a_list_the_one_that_made_the_item_is_told(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, PRIORITIES.replace("ERRORS", "errors"), "GG203", "self.weights[i] = error.abs() + 1e-3", "watch")
    assert "detach" in diagnosis.fixes[0].title
    assert not said(tmp_path, PRIORITIES.replace("ERRORS", "errors.detach()"), "watch")


def test_an_average_that_is_written_is_not_taken_for_the_model_it_is_made_of(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, AVERAGED, "GG102", "p.copy_(a)", "watch")
    assert "lerp_" not in " ".join([diagnosis.headline, *diagnosis.notes])
    assert not said(tmp_path, AVERAGED.replace("step == 1", "False"), "watch")


SHARED_BY_NETWORKS = """
def match(real, fake):
    return sum(F.l1_loss(f, r) for r, f in zip(real, fake))

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.one(x).tanh()
        return self.two(h), [h]

G, D = nn.Linear(3, 2), Critic()
opt_g, opt_d = torch.optim.SGD(G.parameters(), lr=0.1), torch.optim.SGD(D.parameters(), lr=0.1)
for _ in range(2):
    fake = G(torch.randn(8, 3))
    real_score, real_feats = D(torch.randn(8, 2))
    d_loss = (real_score - 1).square().mean() + D(fake.detach())[0].square().mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
    score, feats = D(fake)
    g_loss = (score - 1).square().mean() + match(real_feats, feats)
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
"""

ON_THE_WRAPPER = """
def scaled(fn):
    def wrapper(*args):
        value = fn(*args)
        wrapper.mean = 0.9 * wrapper.mean + 0.1 * value
        return value / wrapper.mean
    wrapper.mean = START
    return wrapper

@scaled
def loss_of(x, y):
    return F.mse_loss(x, y)

net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = loss_of(net(torch.randn(8, 3)).tanh(), torch.ones(8, 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

IN_A_RECORD = """
from dataclasses import dataclass, replace

@dataclass(frozen=True)
class State:
    h: torch.Tensor
    error: torch.Tensor

    def advance(self, cell, x):
        h = torch.tanh(cell(x) + self.h)
        return replace(self, h=h, error=self.error + h.square().mean())

    def begun(self):
        return replace(self, h=self.h, error=torch.zeros(()))

def windows(cell):
    state = State(torch.zeros(4, 3), torch.zeros(()))
    while True:
        state = state.begun()
        for _ in range(2):
            state = state.advance(cell, torch.randn(4, 3))
        yield state.error

cell = nn.Linear(3, 3)
opt = torch.optim.SGD(cell.parameters(), lr=0.1)
for _, loss in zip(range(3), windows(cell)):
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

THREAD = """
import queue, threading

def fill(free, full):
    while (slot := free.get()) is not None:
        for part in slot:
            part.normal_()
        full.put(slot)

free, full = queue.Queue(), queue.Queue()
free.put((torch.empty(4, 3),))
threading.Thread(target=fill, args=(free, full), daemon=True).start()
net = nn.Linear(3, 1)
loss = 0
for _ in range(2):
    slot = full.get()
    x = TAKEN
    loss = loss + net(x).square().mean()
    free.put(slot)
    last = full.get()
    full.put(last)
try:
    loss.backward()
finally:
    free.put(None)
"""


def test_features_of_the_other_networks_step_are_detached_in_this_ones_loss(tmp_path: Path) -> None:
    culprit = "g_loss = (score - 1).square().mean() + match(real_feats, feats)"
    diagnosis = only(tmp_path, SHARED_BY_NETWORKS, "GG202", culprit)
    assert diagnosis.fixes[0].patch is not None and "add the losses up" not in diagnosis.fixes[0].title
    assert not said(tmp_path, applied(SHARED_BY_NETWORKS, diagnosis.fixes[0].patch))


def test_a_decorators_attribute_carries_its_graph(tmp_path: Path) -> None:
    source = ON_THE_WRAPPER.replace("START", "torch.ones(())")
    diagnosis = only(tmp_path, source, "GG203", "wrapper.mean = 0.9 * wrapper.mean + 0.1 * value", "watch")
    assert "wrapper.mean.detach()" in diagnosis.fixes[0].title
    assert not said(tmp_path, source.replace("0.9 * wrapper.mean", "0.9 * wrapper.mean.detach()"), "watch")


def test_a_record_that_is_replaced_carries_the_state(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, IN_A_RECORD, "GG203", "return replace(self, h=h, error=self.error + h.square().mean())", "watch")
    assert "`self.h` of `State`" in diagnosis.headline
    assert not said(tmp_path, IN_A_RECORD.replace("h=self.h,", "h=self.h.detach(),"), "watch")


def test_a_thread_that_fills_its_slot_again_is_spoken_of(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, THREAD.replace("TAKEN", "slot[0]"), "GG101", "part.normal_()")
    assert "in another thread" in diagnosis.headline and "`x.clone()`" in diagnosis.fixes[0].title
    assert not said(tmp_path, THREAD.replace("TAKEN", "slot[0].clone()"))
