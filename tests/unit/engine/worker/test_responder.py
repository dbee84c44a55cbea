"""Responder: order, its bound, and what happens when an answer cannot be given."""

import threading

from quire_engine.worker.worker_process import Responder
from support.processes import ended, start_forked


def test_answers_are_told_in_order_and_no_more_wait_than_may() -> None:
    told: list[int] = []
    may_tell = threading.Semaphore(0)

    def respond(answer: int) -> None:
        assert may_tell.acquire(timeout=30)
        told.append(answer)

    responder = Responder(respond, max_waiting=2)
    put = threading.Semaphore(0)

    def put_all() -> None:
        for answer in range(6):
            responder.put(answer)
            put.release()

    thread = threading.Thread(target=put_all)
    thread.start()
    assert all(put.acquire(timeout=30) for _ in range(3)), "one is being told and two wait"
    assert not put.acquire(timeout=0.05), "more wait than may"
    assert told == []
    may_tell.release(6)
    thread.join(30)
    responder.wait_until_idle()
    assert told == list(range(6))


def test_process_ends_when_an_answer_cannot_be_told() -> None:
    source = """
        import threading
        from quire_engine.worker.worker_process import Responder

        Responder(lambda answer: {}[answer], max_waiting=1).put("lost")
        threading.Event().wait()
    """
    process = start_forked(source)
    with ended([process]):
        assert process.wait(60) == 1
