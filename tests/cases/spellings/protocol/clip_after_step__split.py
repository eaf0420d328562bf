# /// case
# title = "Variational graph RNN: gradients are clipped after the optimizer has used them"
# source = "https://github.com/VGraphRNN/VGRNN/issues/4"
# outcome = "silent"
# torch_error = ""
# cause = "grad-overwritten"
# names = ["clip_grad_norm_"]
# fix = "clip between backward() and step()"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

from clip_after_step__split_parts import GraphRNN, dynamic_graph

torch.manual_seed(0)


model = GraphRNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
clip = 0.3
graphs = dynamic_graph()

for k in range(100):
    optimizer.zero_grad()
    nll, kld = model(graphs)
    loss = nll + 0.05 * kld
    loss.backward()
    optimizer.step()  # <- related
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)  # <- culprit
    if k % 20 == 0:
        print(f"epoch {k} nll {nll.item():.4f} kld {kld.item():.4f}")
