import torch as th
import torch.nn as nn
from torch.nn import Embedding, Linear, Module, Sequential, Tanh
from torch.distributions import Categorical


class Policy(Module):
    def __init__(self, n_states=8, n_actions=3):
        super().__init__()
        self.net = Sequential(Embedding(num_embeddings=n_states, embedding_dim=16), Tanh(), Linear(in_features=16, out_features=n_actions))

    def forward(self, state):
        return Categorical(logits=self.net(state))


def update(policy, optimizer, states, actions, advantages, old_log_prob, clip=0.2):
    ratio = th.exp(policy(states).log_prob(actions) - old_log_prob)
    surrogate = th.min(ratio * advantages, th.clamp(ratio, 1 - clip, 1 + clip) * advantages)
    loss = -th.mean(surrogate) - 0.01 * th.mean(policy(states).entropy())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def rollout(policy, n=256):
    states = th.randint(0, 8, (n,))
    with th.no_grad():
        dist = policy(states)
        actions = dist.sample()
        log_prob = dist.log_prob(actions)
    rewards = (actions == states % 3).float()
    return states, actions, rewards, log_prob


th.manual_seed(0)
policy = Policy()
optimizer = th.optim.SGD(policy.parameters(), 0.5, momentum=0.9)
for iteration in range(25):
    states, actions, rewards, log_prob = rollout(policy)
    advantages = (rewards - th.mean(rewards)) / (th.std(rewards) + 1e-6)
    for _ in range(4):
        update(policy, optimizer, states, actions, advantages, log_prob)
    if iteration % 5 == 0:
        print(iteration, "mean reward", th.mean(rewards).item())
