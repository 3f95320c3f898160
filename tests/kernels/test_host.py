"""The kernels on several threads: the same results, all of the work done once, and what goes wrong is told."""

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from okrt.kernels import cpu, host, reference
from okrt.kernels.host import Host
from tests.kernel_cases import ARGUMENTS, assert_all_same, cases

THREE = Host(3)
shared_out = cases(st.sampled_from([0, 1, 4 * cpu.BLOCK - 1, 4 * cpu.BLOCK, 5 * cpu.BLOCK + 77]))


@given(case=shared_out)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_threads_equal_the_reference(case, monkeypatch):
    monkeypatch.setattr(host, "_PART_MIN", cpu.BLOCK)
    assert_all_same(THREE, reference, list(ARGUMENTS), case)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_item_is_taken_once(threads):
    done = []
    Host(threads).each(done.append, range(1000))
    assert sorted(done) == list(range(1000))


def test_items_are_shared_out():
    takers = set()

    def work(item: int) -> None:
        takers.add(threading.get_ident())
        time.sleep(0.01)

    Host(3).each(work, range(30))
    assert len(takers) == 3


@pytest.mark.parametrize("bad", [0, 7, 29])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_any_thread_is_raised(threads, bad):
    def work(item: int) -> None:
        time.sleep(0.001)
        if item == bad:
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match=f"item {bad}"):
        Host(threads).each(work, range(30))
