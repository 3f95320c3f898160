"""The world as each rank sees it."""

import socket

import torch
from mpi4py import MPI

import okrt

COMM = MPI.COMM_WORLD


def test_world() -> None:
    world = okrt.init()
    assert okrt.init() is world
    assert (world.rank, world.size) == (COMM.rank, COMM.size)
    assert world.comm == COMM
    assert (world.transport.rank, world.transport.size) == (COMM.rank, COMM.size)


def test_local_ranks_count_those_of_one_host() -> None:
    world = okrt.init()
    ranks = COMM.allgather((socket.gethostname(), world.local_rank))
    here = [local_rank for host, local_rank in ranks if host == socket.gethostname()]
    assert here == list(range(world.local_size))


def test_device() -> None:
    device = okrt.init().device
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        assert device.index == okrt.init().local_rank % torch.cuda.device_count()
