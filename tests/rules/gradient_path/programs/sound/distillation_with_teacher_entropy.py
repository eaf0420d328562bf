import torch
from torch import nn

torch.manual_seed(0)
student, teacher = nn.Linear(5, 3), nn.Linear(5, 3)
optimizer = torch.optim.Adam(student.parameters())
for _ in range(4):
    x = torch.randn(8, 5)
    with torch.no_grad():
        p = teacher(x).softmax(-1)
        teacher_entropy = -(p * p.log()).sum(-1).mean()
    cross = -(p * student(x).log_softmax(-1)).sum(-1).mean()
    loss = cross - teacher_entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
