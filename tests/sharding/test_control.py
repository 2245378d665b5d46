"""The control channel between real sockets on loopback; no JAX takes part."""

import contextlib
import logging
import pickle
import queue
import socket
import threading
import time

import hypothesis
import msgpack
import pytest
import zmq
from hypothesis import strategies as st

from jorca.config import ConfigError
from jorca.sharding.control import MasterChannel, WorkerChannel
from jorca.sharding.messages import (
    PROTOCOL,
    HandshakeError,
    ProcessLost,
    Secret,
    decode,
    encode,
    encode_body,
    encode_header,
)

SECRET = Secret(b"a secret of the tests")
FACTS = {"jorca": "1", "engine.page_size": 8}
PATIENCE_S = 30

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


class End:
    """What a channel tells its owner."""

    def __init__(self):
        self.messages: queue.Queue = queue.Queue()
        self.errors: queue.Queue = queue.Queue()

    def callbacks(self):
        return {"receive": self.messages.put, "lost": self.errors.put}

    def next(self):
        return self.messages.get(timeout=PATIENCE_S)

    def error(self):
        return str(self.errors.get(timeout=PATIENCE_S))


class Net:
    """A master and whoever comes to it."""

    def __init__(self, stack, num_processes, heartbeat_s=5.0):
        self.end = End()
        self.heartbeat_s = heartbeat_s
        self._stack = stack
        self.master = MasterChannel(
            "127.0.0.1:0", SECRET, num_processes=num_processes, facts=FACTS, heartbeat_s=heartbeat_s,
            **self.end.callbacks(),
        )  # fmt: skip
        stack.callback(self.master.close)

    def worker(self, process, secret=SECRET, facts=FACTS):
        end = End()
        channel = WorkerChannel(
            self.master.address, secret, process=process, facts=facts, heartbeat_s=self.heartbeat_s,
            **end.callbacks(),
        )  # fmt: skip
        self._stack.callback(channel.close)
        return channel, end

    def joined(self, *processes):
        """Workers that have been taken in."""
        made = [self.worker(process) for process in processes]
        for channel, _ in made:
            channel.wait_for_master(PATIENCE_S)
        return made

    def puppet(self, secret=SECRET):
        """A socket that knows the secret and says what it is told to."""
        context = zmq.Context()
        puppet = context.socket(zmq.DEALER)
        puppet.set(zmq.LINGER, 0)
        puppet.set(zmq.RCVTIMEO, PATIENCE_S * 1000)
        puppet.curve_publickey, puppet.curve_secretkey = zmq.curve_keypair()
        puppet.curve_serverkey = secret.master_keys()[0]
        puppet.connect(f"tcp://{self.master.address}")
        self._stack.callback(context.term)
        self._stack.callback(puppet.close)
        return puppet

    def puppet_in(self, process):
        """One that has been taken in."""
        puppet = self.puppet()
        puppet.send_multipart(encode(0, "hello", {"process": process, "facts": FACTS}))
        assert decode(puppet.recv_multipart())[2] == "welcome"
        return puppet


@pytest.fixture
def net():
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: Net(stack, *args, **kwargs)


class _Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


class TestMessages:
    @hypothesis.given(number=st.integers(0, 2**64 - 1), kind=st.text(), body=plain)
    def test_a_message_survives_the_way(self, number, kind, body):
        assert decode(encode(number, kind, body)) == (PROTOCOL, number, kind, body)

    @hypothesis.given(frames=st.lists(st.binary(max_size=60), max_size=3))
    def test_whatever_else_comes_is_a_value_error(self, frames):
        with contextlib.suppress(ValueError):
            _, number, kind, _ = decode(frames)
            assert (type(number), type(kind)) == (int, str)

    def test_a_pickle_is_not_run(self, tmp_path):
        evil = pickle.dumps(_Touch(str(tmp_path / "touched")))
        for body in (evil, encode_body(evil), encode_body(msgpack.ExtType(5, evil))):
            with contextlib.suppress(ValueError):
                decode([encode_header(0, "hello"), body])
        assert not (tmp_path / "touched").exists()
        pickle.loads(evil).close()
        assert (tmp_path / "touched").exists()

    def test_a_secret_is_long_and_does_not_show(self, tmp_path):
        with pytest.raises(ConfigError, match=r"^the secret must have at least 16 bytes, got 5; "):
            Secret(b"short")
        with pytest.raises(ConfigError, match=r"^secret_file .*/none cannot be read: No such file"):
            Secret.from_file(tmp_path / "none")
        file = tmp_path / "secret"
        file.write_text("0123456789abcdef\n")
        assert Secret.from_file(file).data == b"0123456789abcdef"
        assert "0123" not in repr(Secret.from_file(file))


class TestExchange:
    def test_messages_go_both_ways_in_order(self, net):
        net = net(3)
        (first, at_first), (second, at_second) = net.joined(1, 2)
        net.master.wait_for_workers(PATIENCE_S)
        for i in range(50):
            net.master.send("step", {"i": i, "data": bytes(i)})
            first.send("one", i)
            second.send("two", [i])
        net.master.send("alone", process=2)
        for end, process in ((at_first, 1), (at_second, 2)):
            assert [end.next() for _ in range(50)] == [
                (0, "step", {"i": i, "data": bytes(i)}) for i in range(50)
            ]
            assert process == 1 or end.next() == (0, "alone", None)
        came = [net.end.next() for _ in range(100)]
        assert [m for m in came if m.process == 1] == [(1, "one", i) for i in range(50)]
        assert [m for m in came if m.process == 2] == [(2, "two", [i]) for i in range(50)]
        assert net.end.errors.empty()

    def test_many_threads_may_send(self, net):
        net = net(2)
        ((worker, _),) = net.joined(1)
        threads = [
            threading.Thread(target=lambda t=t: [worker.send("n", [t, i]) for i in range(100)])
            for t in range(4)
        ]
        for thread in threads:
            thread.start()
        came = [net.end.next().body for _ in range(400)]
        for t in range(4):
            assert [i for thread, i in came if thread == t] == list(range(100))

    def test_signs_of_life_keep_an_idle_channel_open(self, net):
        net = net(2, heartbeat_s=0.5)
        ((worker, end),) = net.joined(1)
        with pytest.raises(queue.Empty):
            net.end.errors.get(timeout=3)  # twice as long as silence is borne
        worker.send("still here")
        assert net.end.next().kind == "still here"
        assert end.errors.empty()

    def test_nobody_waits_for_the_others_when_one_that_has_come_fails(self, net):
        net = net(3)
        ((worker, _),) = net.joined(1)
        worker.fail("its reason")
        with pytest.raises(HandshakeError, match=r"^process 1 has failed: its reason$"):
            net.master.wait_for_workers(600)

    def test_who_is_late_is_known_from_signs_of_life_and_named(self, net):
        net = net(4, heartbeat_s=0.1)
        ((first, at_first),) = net.joined(1)
        for process, progress in ((2, 5), (3, 3)):
            puppet = net.puppet_in(process)
            puppet.send_multipart(encode(1, "beat", progress))
            puppet.send_multipart(encode(2, "told", None))
            assert net.end.next() == (process, "told", None)
        net.master.progress = 5
        first.progress = 5
        while net.master._links[1].progress < 5:
            time.sleep(0.01)
        net.master.give_up(4, 60.0)
        expected = "process 3 has not finished iteration 4 within 60 s: a device or a transfer hangs"
        assert net.end.error() == expected
        assert at_first.error() == expected

    def test_a_good_bye_waits_until_the_workers_have_left(self, net):
        net = net(3)
        workers = net.joined(1, 2)
        closing = threading.Thread(target=net.master.close)
        closing.start()
        assert [end.next().kind for _, end in workers] == ["bye", "bye"]
        workers[0][0].close()
        assert closing.is_alive()
        workers[1][0].close()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert net.end.errors.empty()

    def test_the_port_is_bound_to_the_given_address_alone(self, net):
        assert net(2).master.address.startswith("127.0.0.1:")

    def test_an_address_that_cannot_be_bound_is_refused(self, net):
        taken = net(2).master.address
        with pytest.raises(ConfigError, match=rf"^control must be an address of this host.*got {taken}"):
            MasterChannel(taken, SECRET, num_processes=2, facts={}, heartbeat_s=1, receive=print, lost=print)


class TestHandshake:
    def test_another_secret_is_refused_and_logged(self, net, caplog):
        net = net(2)
        worker, _ = net.worker(1, secret=Secret(b"another one, as long"))
        with pytest.raises(HandshakeError, match=r"^the handshake with 127.0.0.1:.*secret_file the same"):
            worker.wait_for_master(PATIENCE_S)
        with pytest.raises(HandshakeError, match=r"^processes \[1\] have not come within 0.1 s$"):
            net.master.wait_for_workers(0.1)
        assert "a connection to the control port has ended" in caplog.text

    def test_another_config_is_named_on_both_sides(self, net):
        net = net(2)
        worker, _ = net.worker(1, facts={"jorca": "2", "engine.page_size": 8, "more": True})
        message = (
            "process 1 does not fit: jorca is '2' there and '1' in process 0; more is True there and None"
        )
        with pytest.raises(HandshakeError, match=message):
            worker.wait_for_master(PATIENCE_S)
        with pytest.raises(HandshakeError, match=message):
            net.master.wait_for_workers(PATIENCE_S)

    def test_those_who_fit_are_told_to_stop_when_another_does_not(self, net):
        net = net(3)
        ((_, end),) = net.joined(1)
        net.worker(2, facts={})
        with pytest.raises(HandshakeError):
            net.master.wait_for_workers(PATIENCE_S)
        assert "process 2 does not fit" in end.error()

    @pytest.mark.parametrize("process", [1, 0, 3, -1])
    def test_a_number_that_is_taken_or_too_large_is_refused(self, net, process):
        net = net(3)
        net.joined(1)
        worker, _ = net.worker(process)
        with pytest.raises(HandshakeError, match=f"^process 0 refuses: process_id .* got {process} again"):
            worker.wait_for_master(PATIENCE_S)

    def test_another_protocol_is_refused(self, net):
        net = net(2)
        puppet = net.puppet()
        puppet.send_multipart([msgpack.packb([PROTOCOL + 1, 0, "hello"]), msgpack.packb({"process": 1})])
        with pytest.raises(HandshakeError, match="process 1 speaks control protocol 2, process 0 speaks 1"):
            net.master.wait_for_workers(PATIENCE_S)
        assert decode(puppet.recv_multipart())[2] == "refuse"

    def test_a_master_that_is_not_there_is_not_waited_for_for_ever(self):
        end = End()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        worker = WorkerChannel(address, SECRET, process=1, facts={}, heartbeat_s=1, **end.callbacks())
        with pytest.raises(HandshakeError, match=f"^process 0 has not answered at {address} within 0.2 s$"):
            worker.wait_for_master(0.2)


class TestLoss:
    @pytest.mark.parametrize(
        ("number", "message"),
        [
            (2, "process 1 sent control message 2, which leaves a gap after message 0"),
            (0, "process 1 sent control message 0, which repeats message 0"),
        ],
    )
    def test_gaps_and_repeats_are_noticed(self, net, number, message):
        net = net(2)
        puppet = net.puppet_in(1)
        puppet.send_multipart(encode(number, "outputs", None))
        assert net.end.error() == message
        assert net.end.messages.empty()
        with pytest.raises(ProcessLost, match=message):
            net.master.send("step")

    def test_a_silent_worker_is_lost_and_the_others_are_told(self, net):
        net = net(3, heartbeat_s=0.5)
        puppet = net.puppet_in(1)
        ((_, end),) = net.joined(2)
        message = "process 1 has been silent for 1.5 s: it has died, is stopped or out of reach"
        assert net.end.error() == message
        assert end.error() == message
        kinds = []
        while not kinds or kinds[-1] == "beat":
            kinds.append(decode(puppet.recv_multipart())[2])
        assert kinds[-1] != "step"

    def test_a_worker_whose_connection_ends_is_lost_at_once(self, net):
        net = net(2, heartbeat_s=1000)
        net.puppet_in(1).close()
        assert net.end.error() == "process 1 has closed its connection: it has died, or cannot be reached"

    def test_a_worker_that_fails_is_named_with_its_error(self, net):
        net = net(3)
        (failing, _), (_, end) = net.joined(1, 2)
        failing.fail("out of memory")
        assert net.end.error() == end.error() == "process 1 has failed: out of memory"

    def test_a_master_that_fails_tells_the_workers(self, net):
        net = net(2)
        ((_, end),) = net.joined(1)
        net.master.fail("no more")
        assert end.error() == net.end.error() == "process 0 has failed: no more"

    def test_a_message_that_its_reader_does_not_understand_is_a_failure(self, net, caplog):
        net = net(2)

        def confused(message):
            raise KeyError("what")

        worker, end = net.worker(1)
        worker._receive = confused
        worker.wait_for_master(PATIENCE_S)
        net.master.send("step")
        assert "process 0 sent a step message that was not understood: KeyError('what')" in end.error()


class TestStrangers:
    """What does not know the secret, and what does but talks nonsense."""

    @pytest.fixture
    def busy(self, net, caplog):
        net = net(2)
        ((worker, _),) = net.joined(1)
        yield net, caplog
        worker.send("works")
        assert net.end.next() == (1, "works", None)
        assert net.end.messages.empty()
        assert net.end.errors.empty()

    @hypothesis.settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    @hypothesis.given(data=st.binary(min_size=1, max_size=200))
    @hypothesis.example(data=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    @hypothesis.example(data=b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
    @hypothesis.example(data=b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x02" + b"\xff" * 8)
    def test_foreign_bytes_are_ignored_and_logged(self, busy, data):
        net, caplog = busy
        caplog.clear()
        host, port = net.master.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(data)
        for _ in range(100):
            if caplog.records:
                break
            threading.Event().wait(0.05)
        assert "a connection to the control port has ended" in caplog.text

    @hypothesis.settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    @hypothesis.given(frames=st.lists(st.binary(max_size=40), min_size=1, max_size=3))
    @hypothesis.example(frames=encode(0, "hello", None))
    @hypothesis.example(frames=encode(0, "outputs", {"seq": 0}))
    @hypothesis.example(frames=encode(0, "hello", {"process": True}))
    def test_nonsense_of_one_who_knows_the_secret_is_ignored_and_logged(self, busy, frames):
        net, caplog = busy
        caplog.clear()
        puppet = net.puppet()
        puppet.send_multipart(frames)
        for _ in range(100):
            if caplog.records:
                break
            threading.Event().wait(0.05)
        assert "ignored" in caplog.text
        assert {record.levelno for record in caplog.records} == {logging.WARNING}
        puppet.close()

    def test_nonsense_of_a_worker_is_ignored_and_shows_as_a_gap_if_it_was_a_message(self, net, caplog):
        net = net(2)
        puppet = net.puppet_in(1)
        puppet.send_multipart([b"\xc1", b"\xc1"])
        puppet.send_multipart(encode(1, "fine", None))
        assert net.end.next() == (1, "fine", None)
        assert "ignored 2 bytes on the control port" in caplog.text
        puppet.send_multipart(encode(3, "late", None))
        assert "leaves a gap" in net.end.error()
