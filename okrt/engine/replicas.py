"""What keeps the replicas of a model alike apart from gradients: the start, and buffers that change."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from okrt.buffers import HOST_DTYPES
from okrt.engine.buckets import MakeReducer
from okrt.errors import UsageError
from okrt.reducers import Reducer
from okrt.reducers import reducer as make_reducer
from okrt.transport import Transport
from okrt.world import agree


def trained(module: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """The names of the parameters that require a gradient, shared ones once."""
    return {p: name for name, p in module.named_parameters() if p.requires_grad}


def agree_on_model(
    module: torch.nn.Module, settings: dict[str, Any], make_reducer: MakeReducer, transport: Transport
) -> None:
    """An error on every rank unless all have the same settings, names, shapes and types, and can train them."""
    refusal = None
    try:
        check_parameters(trained(module))
        make_reducer()
    except UsageError as error:
        refusal = error
    shapes = {
        f"{kind} {name}": f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, tensor in tensors
    }
    names = {"trained parameters": " ".join(trained(module).values())}
    devices = {"devices": " ".join(sorted({p.device.type for p in trained(module)}))}
    agree(transport, settings | shapes | names | devices, refusal, flag=False)


def check_parameters(names: dict[torch.nn.Parameter, str]) -> None:
    if not names:
        raise UsageError("the model has no parameter that requires a gradient: there is nothing to train")
    for p, name in names.items():
        dtype = str(p.dtype).removeprefix("torch.")
        if dtype not in HOST_DTYPES:
            raise UsageError(f"parameter {name} is {dtype}: use one of {', '.join(HOST_DTYPES)}")
        if p.device.type not in ("cpu", "cuda"):
            raise UsageError(f"parameter {name} is on {p.device}: move the model to a GPU or the CPU")
    devices = {p.device: name for p, name in names.items()}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise UsageError(f"the parameters are on several devices ({places}): a rank has one, use model.to(device)")


def broadcast(tensors: Sequence[torch.Tensor], transport: Transport) -> None:
    """Overwrites the tensors by those of rank 0."""
    if transport.size == 1 or not tensors:
        return
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    sizes = np.zeros(transport.size, np.int64)
    sizes[0] = sum(part.size for part in flat)
    out = np.empty(int(sizes[0]), np.uint8)
    transport.allgatherv(np.concatenate(flat) if transport.rank == 0 else out[:0], sizes, out)
    with torch.no_grad():
        for tensor, part in zip(tensors, np.split(out, np.cumsum([part.size for part in flat])[:-1]), strict=True):
            tensor.copy_(torch.from_numpy(part.copy()).view(tensor.dtype).view(tensor.shape))


class BufferMean:
    """Averages buffers that have changed on any rank, such as the statistics of batch norm."""

    def __init__(self, module: torch.nn.Module, transport: Transport) -> None:
        self._module, self._transport = module, transport
        self._reducers: dict[int, Reducer] = {}
        # Batch norm does not raise the version of what it changes: only a copy tells.
        self._known = [buffer.clone() for buffer in self._buffers()]

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in self._module.buffers() if buffer.is_floating_point()]

    def changed(self) -> np.ndarray:
        """A flag for each buffer, as this rank sees it."""
        pairs = zip(self._buffers(), self._known, strict=True)
        flags = [(buffer != known).any() for buffer, known in pairs]
        return torch.stack(flags).cpu().numpy().astype(np.int32) if flags else np.zeros(0, np.int32)

    def average(self, flags: np.ndarray) -> int:
        """Those flagged, which must be the same on all ranks. Returns the bytes this rank received for it."""
        chosen = [i for i, flag in enumerate(flags) if flag]
        if not chosen:
            return 0
        buffers = self._buffers()
        flat = torch.cat([buffers[i].detach().flatten().float() for i in chosen])
        if flat.numel() not in self._reducers:
            self._reducers[flat.numel()] = make_reducer("dense", transport=self._transport)
        reducer = self._reducers[flat.numel()]
        reducer.allreduce(flat, out=flat)
        with torch.no_grad():
            for i, mean in zip(chosen, flat.split([buffers[i].numel() for i in chosen]), strict=True):
                buffers[i].copy_(mean.view(buffers[i].shape))
                self._known[i].copy_(buffers[i])
        return 0 if reducer.last is None else reducer.last.bytes_received
