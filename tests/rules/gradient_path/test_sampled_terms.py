"""GG308: a sample whose log-probability is used, with a frozen network's value of it as a term of its own beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, only, said

BEGIN = """from torch.distributions import Independent, Normal
actor, other = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)
critics = [nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).requires_grad_(False) for _ in range(2)]
optimizer = torch.optim.Adam(actor.parameters())
"""
STEP = """
for _ in range(4):
    optimizer.zero_grad()
    objective(torch.randn(16, 3)).backward()
    optimizer.step()
"""
BROKEN = {
    "beside it": """
def objective(s):
    policy = Normal(actor(s), 1.0)
    a = policy.sample()
    log_probability = policy.log_prob(a).sum(1)
    catalog_value = critics[0](torch.cat([s, a], 1)).squeeze(-1)
    return (0.2 * log_probability - catalog_value).mean()
""",
    "in a list": """
def objective(s):
    policy = Normal(actor(s), 1.0)
    a = policy.sample()
    terms = [0.2 * policy.log_prob(a).sum(1, keepdim=True), *[-0.5 * critic(torch.cat([s, a], 1)) for critic in critics]]
    return torch.cat(terms, 1).sum(1).mean()
""",
    "by helpers": """
def worth(s, a):
    x = torch.cat([s, a], 1)
    return torch.min(*[critic(x) for critic in critics])
def combined(policy, s, a):
    loss = 0.2 * policy.log_prob(a).sum(1).mean()
    loss = loss - worth(s, a).mean()
    return loss
def objective(s):
    policy = Normal(actor(s), 1.0)
    a = policy.sample()
    return combined(policy, s, a)
""",
}
SOUND = {
    "log-probability under a frozen policy": """
def objective(s):
    policy = Normal(actor(s), 1.0)
    a = policy.sample()
    score = policy.log_prob(a).sum(1)
    before = Normal(other(s), 1.0).log_prob(a).sum(1)
    return -(score * torch.randn(16)).mean() + 0.1 * (score - before).mean()
""",
    "a density written out": """
def density(centre, a):
    return (-0.5 * (a - centre) ** 2).sum(1)
def objective(s):
    policy = Normal(actor(s), 1.0)
    a = policy.sample()
    score = policy.log_prob(a).sum(1)
    return -(score * torch.randn(16)).mean() + 0.1 * (score - density(other(s), a)).mean()
""",
    "a quadratic form": """
precision = torch.eye(2) + 0.1
def objective(s):
    policy = Independent(Normal(actor(s), 1.0), 1)
    a = policy.sample()
    d = a - other(s)
    terms = [policy.log_prob(a), ((d @ precision) * d).sum(1)]
    return torch.stack([term * 0.5 for term in terms]).mean() - (terms[0] * torch.randn(16)).mean()
""",
    "a factor of the score": """
def objective(s):
    policy = Normal(actor(s), 1.0)
    a = policy.sample()
    return -(policy.log_prob(a).sum(1) * critics[0](torch.cat([s, a], 1)).squeeze(-1)).mean()
""",
}


@pytest.mark.parametrize("objective", BROKEN.values(), ids=BROKEN)
def test_a_frozen_networks_value_beside_the_log_probability(objective: str, tmp_path: Path) -> None:
    source = BEGIN + objective + STEP
    diagnosis = only(tmp_path, source, "GG308", "policy.sample()")
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    assert said(tmp_path, applied(source, patch)) == []


@pytest.mark.parametrize("objective", SOUND.values(), ids=SOUND)
def test_densities_and_factors_are_no_terms_of_their_own(objective: str, tmp_path: Path) -> None:
    assert said(tmp_path, BEGIN + objective + STEP) == []
