"""Work shared out to threads: all of it is done, once, and what goes wrong is told."""

import threading
import time

import pytest

from okrt.kernels.lanes import Lanes


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_item_is_taken_once(threads):
    done = []
    Lanes(threads).each(done.append, range(1000))
    assert sorted(done) == list(range(1000))


def test_items_are_shared_out():
    takers = set()

    def work(item: int) -> None:
        takers.add(threading.get_ident())
        time.sleep(0.01)

    Lanes(3).each(work, range(30))
    assert len(takers) == 3


@pytest.mark.parametrize("bad", [0, 7, 29])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_any_thread_is_raised(threads, bad):
    def work(item: int) -> None:
        time.sleep(0.001)
        if item == bad:
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match=f"item {bad}"):
        Lanes(threads).each(work, range(30))
