from nats.aio.msg import Msg

from agentjet.bus.mailbox import Mailbox


def mailbox() -> Mailbox:
    box = Mailbox()
    box.inbox = "_INBOX.abc"
    return box


def reply(subject: str) -> Msg:
    return Msg(_client=None, subject=subject, data=b"yes")  # type: ignore[arg-type]


async def test_each_reply_goes_to_the_box_that_asked():
    box, first, second = mailbox(), [], []
    with box.box(first.append) as one, box.box(second.append) as two:
        assert one != two and one.startswith("_INBOX.abc.")
        await box.take(reply(two))
        await box.take(reply(one))
    assert [[message.subject for message in found] for found in (first, second)] == [[one], [two]]


async def test_a_reply_that_comes_after_its_box_was_closed_is_dropped():
    box, found = mailbox(), []
    with box.box(found.append) as subject:
        pass
    await box.take(reply(subject))
    box.lose()
    assert found == []


async def test_all_open_boxes_hear_that_the_connection_broke():
    box, found = mailbox(), []
    with box.box(found.append), box.box(found.append):
        box.lose()
    assert found == [None, None]
