"""How bytes move: the protocol, MPI behind it, and the ledger that counts bytes and messages by phase."""

from okrt.transport.ledger import Ledger
from okrt.transport.protocol import Transport

__all__ = ["Ledger", "Transport"]
