# /// case
# title = "requires_grad is set as an attribute of the head module, its parameters stay frozen"
# source = "https://github.com/CSCYQJ/MICCAI23-ProtoContra-SFDA/issues/18"
# outcome = "raises"
# torch_error = "element 0 of tensors does not require grad and does not have a grad_fn"
# cause = "all-frozen"
# names = ["outc", "requires_grad"]
# fix = "model.outc.requires_grad_(True)"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

from head_requires_grad_attribute__split_parts import Adapter, OrganSegmenter, new_scanner

torch.manual_seed(0)


adapter = Adapter(OrganSegmenter())
for it in range(60):
    value = adapter.step(*new_scanner())
    if it % 20 == 19:
        print(f"iter {it} loss {value:.4f}")
