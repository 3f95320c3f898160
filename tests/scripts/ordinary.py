"""An ordinary torch script: its own model, its own loop. The test adds one line where the comment says so."""

import os
import sys

import torch
from torch import nn

rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
torch.set_num_threads(1)
torch.manual_seed(rank)
inputs = torch.randn(256, 12, generator=torch.Generator().manual_seed(1))
targets = (inputs[:, :5].sum(1) > 0).long() + 2 * (inputs[:, 5:].sum(1) > 0).long()

model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
# HERE
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
loader = torch.utils.data.DataLoader(list(range(rank, 256, size)), batch_size=16)
for epoch in range(4):
    for batch in loader:
        loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        whole = nn.functional.cross_entropy(model(inputs), targets)
    if rank == 0:
        print(f"epoch {epoch}: {float(loss.detach()):.9f} {float(whole):.9f}", file=sys.stdout, flush=True)
