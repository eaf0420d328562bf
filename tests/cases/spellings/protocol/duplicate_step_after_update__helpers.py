# /// case
# title = "Every gradient is applied twice: update() already steps, the loop steps again"
# source = "https://github.com/mzolfaghari/ECO-pytorch/pull/1"
# outcome = "silent"
# torch_error = ""
# cause = "step-without-backward"
# names = ["optimizer"]
# fix = "remove the second step()"
# ///
import torch
import torch.nn as nn
from torch.distributions import Categorical


def policy_forward(owner, state):
    return Categorical(logits=owner.net(state))


class Policy(nn.Module):
    def __init__(self, n_states=8, n_actions=3):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(n_states, 16), nn.Tanh(), nn.Linear(16, n_actions))

    def forward(self, state):
        return policy_forward(self, state)


def update(policy, optimizer, states, actions, advantages, old_log_prob, clip=0.2):
    ratio = (policy(states).log_prob(actions) - old_log_prob).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    loss = -surrogate.mean() - 0.01 * policy(states).entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- related
    return loss.item()


def rollout(policy, n=256):
    states = torch.randint(0, 8, (n,))
    with torch.no_grad():
        dist = policy(states)
        actions = dist.sample()
        log_prob = dist.log_prob(actions)
    rewards = (actions == states % 3).float()
    return states, actions, rewards, log_prob


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.5, momentum=0.9)
for iteration in range(25):
    states, actions, rewards, log_prob = rollout(policy)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for _ in range(4):
        update(policy, optimizer, states, actions, advantages, log_prob)
        optimizer.step()  # <- culprit
    if iteration % 5 == 0:
        print(iteration, "mean reward", rewards.mean().item())
