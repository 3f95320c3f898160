"""The bytes that the ledger counts, against those that the hosts' network interfaces count."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from okrt.perf.lab import Lab

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="the lab needs root, ip and tc",
)
STEPS = 2
MESSAGE_BYTES = 2000  # headers, acknowledgements and the handshake of a message

# Prints for each reducer and rank what its interface and its ledger count between two barriers.
SCRIPT = f"""
import json, time
import okrt
from okrt.perf.synthetic import SyntheticGradient

world = okrt.init()
gradient = SyntheticGradient(500_000, world.rank, 0)

def interface_bytes():
    for line in open("/proc/self/net/dev"):
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[0])

for name, options in (("dense", {{}}), ("oktopk", {{"density": 0.02}})):
    reducer = okrt.reducer(name, **options)
    reducer.allreduce(gradient(0))
    counted = messages = 0
    world.comm.barrier()
    time.sleep(0.2)
    before = interface_bytes()
    for step in range({STEPS}):
        x = gradient(1 + step)
        reducer.allreduce(x, out=x)
        counted += reducer.last.bytes_received
        messages += reducer.last.messages
    time.sleep(0.2)
    wire = interface_bytes() - before
    for row in world.comm.gather([name, counted, wire, messages]) or []:
        print(json.dumps(row))
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [3, 4])
def test_bytes_received(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    with Lab(ranks, "1gbit") as lab:
        before = lab.bytes_received()
        single = {"OKRT_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = lab.run([sys.executable, str(script)], single, capture_output=True, text=True, timeout=150)
        whole = [after - start for start, after in zip(before, lab.bytes_received(), strict=True)]
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in rows] == ["dense"] * ranks + ["oktopk"] * ranks
    assert sum(wire for _, _, wire, _ in rows) < sum(whole)
    for _, counted, wire, messages in rows:
        assert counted <= wire <= 1.15 * counted + MESSAGE_BYTES * messages, rows
        assert counted > 20 * MESSAGE_BYTES
