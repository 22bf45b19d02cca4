import signal
import socket

from agentjet.workers.zygote import Zygote


def test_a_pool_that_closes_with_news_unread_ends_the_zygote_without_an_error():
    """A Unix socket closed so is reset at the other end, where an empty one would just end."""
    control, pool = socket.socketpair()
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        with control:
            control.sendall(b"news")
            pool.close()
            Zygote(control, lambda *_: None, lambda *_: None).serve()
    finally:
        signal.signal(signal.SIGCHLD, handler)
