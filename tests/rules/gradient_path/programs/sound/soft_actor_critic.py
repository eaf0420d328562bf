import torch
from torch import nn
from torch.distributions import Normal

torch.manual_seed(0)
actor, q1, q2 = nn.Linear(3, 2), nn.Linear(5, 1), nn.Linear(5, 1)
t1, t2 = nn.Linear(5, 1), nn.Linear(5, 1)
log_alpha = torch.zeros((), requires_grad=True)
pi_opt = torch.optim.Adam(actor.parameters())
q_opt = torch.optim.Adam([*q1.parameters(), *q2.parameters()])
a_opt = torch.optim.Adam([log_alpha])
for _ in range(4):
    s, a, r, s2 = torch.randn(16, 3), torch.randn(16, 2), torch.randn(16, 1), torch.randn(16, 3)
    with torch.no_grad():
        d = Normal(actor(s2), 1.0)
        a2 = d.sample()
        q_next = torch.min(t1(torch.cat([s2, a2], 1)), t2(torch.cat([s2, a2], 1))) - log_alpha.exp() * d.log_prob(a2).sum(1, keepdim=True)
        target = r + 0.99 * q_next
    sa = torch.cat([s, a], 1)
    q_loss = (q1(sa) - target).pow(2).mean() + (q2(sa) - target).pow(2).mean()
    q_opt.zero_grad()
    q_loss.backward()
    q_opt.step()
    d = Normal(actor(s), 1.0)
    new = d.rsample()
    logp = d.log_prob(new).sum(1, keepdim=True)
    alpha = log_alpha.exp().detach()
    pi_loss = (alpha * logp - torch.min(q1(torch.cat([s, new], 1)), q2(torch.cat([s, new], 1)))).mean()
    pi_opt.zero_grad()
    pi_loss.backward()
    pi_opt.step()
    alpha_loss = -(log_alpha * (logp + -2.0).detach()).mean()
    a_opt.zero_grad()
    alpha_loss.backward()
    a_opt.step()
