# /// case
# title = "Policy-gradient terms are packed into a new tensor with torch.tensor"
# source = "https://github.com/kengz/SLM-Lab/pull/133"
# outcome = "raises"
# torch_error = "element 0 of tensors does not require grad and does not have a grad_fn"
# cause = "detached"
# names = ["policy_loss", "torch.tensor"]
# fix = "torch.stack instead of torch.tensor"
# ///
import torch
import torch.nn as nn
from torch.distributions import Categorical

from policy_loss_from_python_list__split_parts import BalanceEnv, Policy, discounted

torch.manual_seed(0)


env, policy = BalanceEnv(), Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
scores = []
for episode in range(100):
    obs, done, log_probs, rewards = env.reset(), False, [], []
    while not done:
        dist = policy(obs)
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        obs, reward, done = env.step(action.item())
        rewards.append(reward)
    returns = torch.tensor(discounted(rewards))
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_loss = torch.tensor([-lp * ret for lp, ret in zip(log_probs, returns)]).sum()  # <- culprit
    optimizer.zero_grad()
    policy_loss.backward()  # <- raises
    optimizer.step()
    scores.append(20 - sum(rewards))
    if episode % 50 == 49:
        print(f"episode {episode} lost reward loss {sum(scores[-50:]) / 50:.3f}")
