"""The page in which an engine core shows that it moves."""

import os
from collections import Counter

from quire_engine.core.heartbeat import NUM_SLOTS, Heartbeat


def num_descriptors() -> int:
    names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return Counter(os.readlink(name) for name in names if os.path.islink(name))["/memfd:quire-heartbeat (deleted)"]


def test_the_other_side_sees_what_is_written() -> None:
    reader = Heartbeat()
    writer = Heartbeat(os.dup(reader.descriptor))
    assert (reader.turns, reader.steps, reader.oldest_request_time) == (0, 0, None)
    writer.turn(2.5)
    writer.step()
    assert (reader.turns, reader.steps, reader.oldest_request_time) == (1, 1, 2.5)
    writer.turn(None)
    assert (reader.turns, reader.oldest_request_time) == (2, None)
    reader.close()
    writer.close()


def test_closing_leaves_no_descriptor() -> None:
    before = num_descriptors()
    heartbeat = Heartbeat()
    assert num_descriptors() > before
    heartbeat.close()
    assert num_descriptors() == before, "without waiting for a garbage collection"


def test_the_other_side_sees_which_requests_were_begun() -> None:
    reader = Heartbeat()
    writer = Heartbeat(os.dup(reader.descriptor))
    first, second = writer.received(), writer.received()
    assert not reader.has_begun(first)
    writer.handle(first)
    assert (reader.has_begun(first), reader.has_begun(second)) == (True, False), "what dies of taking it in counts"
    writer.handle(0)
    assert not reader.has_begun(first)
    writer.begin(second)
    assert (reader.has_begun(first), reader.has_begun(second)) == (False, True)
    writer.begin(second + NUM_SLOTS)
    assert reader.has_begun(second)
    assert not reader.has_begun(second + 2 * NUM_SLOTS)
    reader.close()
    writer.close()
