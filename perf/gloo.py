"""torch.distributed's gloo among the ranks of MPI, as an outside peer in benchmarks."""

import datetime
import fcntl
import os
import socket
import struct
import warnings
from typing import Any

_SIOCGIFADDR = 0x8915
_INTERFACE = "GLOO_SOCKET_IFNAME"


def own_address(world: Any) -> str:
    """The address at which the other ranks reach this process."""
    if _INTERFACE in os.environ:
        request = struct.pack("256s", os.environ[_INTERFACE].encode())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    if world.local_size == world.size:
        os.environ[_INTERFACE] = "lo"
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())


def join_gloo(world: Any) -> None:
    """Makes torch's process group of the ranks of okrt.init(); the address of its store goes round over MPI."""
    # Hosts of a lab have no names, which torch would tell for every connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed as dist
    limit = datetime.timedelta(seconds=world.timeout_s)
    address = own_address(world)
    store = None
    if world.rank == 0:
        store = dist.TCPStore(address, 0, world.size, is_master=True, timeout=limit, wait_for_workers=False)
    host, port = world.transport.gather_texts(f"{address}:{store.port}" if store else "")[0].split(":")
    if store is None:
        store = dist.TCPStore(host, int(port), world.size, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
