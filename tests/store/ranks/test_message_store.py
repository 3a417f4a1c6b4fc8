"""Messages over a store: the same promises over every kind of store, and when it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref

import pytest
import torch.distributed as dist

from everystep.errors import RankFailed
from everystep.store.ranks import message_store as store_module
from everystep.store.ranks.message_store import MAX_MESSAGE_NBYTES, MessageStore, MessageTimeout
from support.worlds.launcher import prepared_context
from support.worlds.patience import PATIENCE_SECONDS, wait_until_stopped


@pytest.fixture(params=["tcp", "prefixed tcp", "hash", "file"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 1)
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return tcp if request.param == "tcp" else dist.PrefixStore("default_pg", tcp)


@pytest.fixture
def mail(store):
    made = MessageStore(store, "mine")
    yield made
    made.close()


def test_messages_are_read_as_they_were_posted(mail):
    for data in (b"", b"\0", b"text", bytes(range(256)), b"repeats " * 10_000, os.urandom(100_000)):
        mail.post("key", data)
        assert mail.read("key", 5) == data
        assert mail.has("key")
    mail.post("empty", b"")
    assert mail.collect(["key", "empty"], 5) == {"key": data, "empty": b""}


def test_numbers_count(mail):
    assert [mail.count("n"), mail.count("n", 0), mail.count("n", 2)] == [1, 1, 3]


def test_what_is_forgotten_is_gone(mail):
    mail.post("a", b"1")
    mail.post("b", b"2")
    mail.forget(["a", "never was there"])
    assert not mail.has("a")
    assert mail.collect(["a", "b"], 0) == {"b": b"2"}


def test_silence_is_reported_after_the_time_given_and_the_connection_goes_on_working(mail):
    started = time.monotonic()
    with pytest.raises(MessageTimeout):
        mail.read("nothing", 0.2)
    assert time.monotonic() - started >= 0.19
    for timeout in (0.0, -1.0):  # never for ever
        with pytest.raises(MessageTimeout):
            mail.read("nothing", timeout)
    mail.post("something", b"x")
    assert mail.collect(["nothing", "something"], 0.1) == {"something": b"x"}
    for timeout in (1e12, float("inf")):  # more than a store can count
        assert mail.read("something", timeout) == b"x"


def test_prefixes_keep_messages_apart(mail, store):
    other = mail.under("other")
    mail.post("key", b"mine")
    other.post("key", b"other")
    assert mail.read("key", 1) == b"mine"
    assert mail.read("other/key", 1) == b"other"
    assert not MessageStore(store, "else").has("key")


def test_threads_that_wait_do_not_keep_others_waiting(mail):
    found = {}

    def wait(number):
        found[number] = mail.read(f"late {number}", PATIENCE_SECONDS)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in range(4):
        mail.post(f"late {number}", b"%d" % number)
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert found == {number: b"%d" % number for number in range(4)}


def test_messages_and_keys_that_no_store_takes_are_refused_before_they_are_sent(mail):
    with pytest.raises(ValueError, match="a message of 8,388,"):
        mail.post("key", os.urandom(MAX_MESSAGE_NBYTES))
    with pytest.raises(ValueError, match="a key of"):
        mail.post("k" * 9000, b"x")
    mail.post("key", os.urandom(MAX_MESSAGE_NBYTES - 1))  # the largest there is
    assert len(mail.read("key", 5)) == MAX_MESSAGE_NBYTES - 1
    mail.post("key", bytes(20 << 20))  # compresses
    assert mail.read("key", 5) == bytes(20 << 20)


def test_bytes_that_no_rank_has_sent_are_a_failure_of_a_rank(mail, store):
    for bad in (b"?", b"\1not deflated"):
        store.set("mine/key", bad)
        with pytest.raises(RankFailed, match="cannot decode the message"):
            mail.read("key", 1)


def test_closed_is_closed(mail):
    mail.post("key", b"x")
    mail.close()
    with pytest.raises(RuntimeError, match="closed"):
        mail.read("key", 1)


def test_a_line_is_used_again_by_the_next_mail_and_goes_with_the_store(monkeypatch):
    connect, connected = store_module._connect, []
    monkeypatch.setattr(store_module, "_connect", lambda store: connected.append(1) or connect(store))
    before = set(threading.enumerate())
    store = dist.PrefixStore("pg", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    gone = weakref.ref(store)
    for turn in range(3):
        mail = MessageStore(store, f"mail {turn}")
        mail.post("key", b"x")
        assert mail.read("key", 5) == b"x"
        mail.close()
    assert len(connected) == 1
    del store
    assert gone() is None  # or the port of the process group would not be free for the next
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_SECONDS)
    assert set(threading.enumerate()) <= before


def test_who_waits_for_a_message_that_is_removed_at_that_moment_gets_the_next(mail, monkeypatch):
    wait = store_module._wait
    removed = threading.Event()

    def remove_what_was_found(store, names, timeout):
        found = wait(store, names, timeout)
        if found and not removed.is_set():
            store.delete_key(names[0])
            removed.set()
        return found

    monkeypatch.setattr(store_module, "_wait", remove_what_was_found)
    mail.post("key", b"first")
    found = []
    thread = threading.Thread(target=lambda: found.append(mail.read("key", PATIENCE_SECONDS)))
    thread.start()
    assert removed.wait(PATIENCE_SECONDS)
    mail.post("key", b"second")
    thread.join(PATIENCE_SECONDS)
    assert found == [b"second"]


def test_a_look_does_not_wait_for_a_message_that_is_removed_at_that_moment(mail, monkeypatch):
    mail.post("stays", b"1")
    mail.post("goes", b"2")
    peek = store_module._peek

    def removed_before(store, name):
        store.delete_key("mine/goes")
        return peek(store, name)

    monkeypatch.setattr(store_module, "_peek", removed_before)
    began = time.monotonic()
    assert mail.collect(["stays", "goes"], 0.0) == {"stays": b"1"}
    assert time.monotonic() - began < PATIENCE_SECONDS / 2


def _host(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


@pytest.fixture
def hosted():
    """A store in another process, and that process."""
    context = prepared_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_host, args=(theirs,))
    process.start()
    yield dist.TCPStore("127.0.0.1", ours.recv(), is_master=False), process
    process.kill()
    process.join()


def test_a_store_whose_host_was_killed_is_a_failure_at_once_also_for_waiting_ranks(hosted):
    store, host = hosted
    mail = MessageStore(store, "mine")
    mail.post("key", b"x")
    errors = []

    def wait():
        try:
            mail.read("nothing", 600)
        except RankFailed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    os.kill(host.pid, signal.SIGKILL)
    thread.join(PATIENCE_SECONDS)
    assert len(errors) == 1
    assert "the process group's store cannot be reached: its host (rank 0 or the launcher)" in str(errors[0])
    with pytest.raises(RankFailed, match="cannot be reached"):
        mail.has("key")


def test_a_store_that_stopped_answering_does_not_keep_anybody(hosted, monkeypatch):
    store, host = hosted
    mail = MessageStore(store, "mine")
    mail.post("key", b"x")
    os.kill(host.pid, signal.SIGSTOP)
    wait_until_stopped(host.pid)
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 0.3)  # as long as it answered it had time to
    for call in (
        lambda: mail.read("nothing", 0.2),
        lambda: mail.collect(["key", "nothing"], 0.2),
        lambda: mail.has("key"),
        lambda: mail.count("number"),
    ):
        with pytest.raises(RankFailed, match="did not answer"):
            call()
