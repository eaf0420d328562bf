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

from duplicate_step_after_update__split_parts import Policy, rollout, update


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
