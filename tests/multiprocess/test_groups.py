"""Several processes on loopback: the answers of one process, and how they end when one is lost."""

import random
import signal
import socket
import time
from typing import Any

import jax
import pytest

from jorca import LLM, ModelConfig, save_checkpoint
from jorca.sharding.hosts import EXIT_FAILED, EXIT_LOST
from multiprocess.group import group
from multiprocess.node import make_requests, serve
from oracle.numpy_gpt import random_params

pytestmark = pytest.mark.multiprocess

# Nothing but heads and feed-forward width divides by the sizes of the meshes.
CONFIG = ModelConfig(vocab_size=37, max_positions=24, num_layers=5, num_heads=2, d_model=16, d_ff=24)
OPTIONS: dict[str, Any] = {"min_bucket": 32, "max_batch_tokens": 32, "max_batch_size": 4, "page_size": 4}
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "model"
    save_checkpoint(path, CONFIG, random_params(CONFIG, 0))
    return path


@pytest.fixture(scope="module")
def right(model):
    return serve(LLM(model, **OPTIONS), make_requests(NUM_REQUESTS))


@pytest.fixture
def start(model, tmp_path):
    """Starts so many processes with so many devices each."""

    def start(number, devices, stages, tensor, change=None, **task):
        options = OPTIONS | {"stages": stages, "tensor": tensor}
        standard = {"requests": NUM_REQUESTS, "rounds": 1, "aborts": [], "fault": None}
        standard |= {"commands": None, "close": False}
        cache = jax.config.jax_compilation_cache_dir
        fixed = {"model": str(model), "devices": devices, "cache": cache, "options": options}
        return group(tmp_path / "group", number, standard | task | fixed, change=change)

    return start


def check_same(outputs, right, aborted=()):
    assert outputs.keys() == right.keys()
    for name, output in outputs.items():
        n = len(output["tokens"])
        assert n == (2 if name in aborted else len(right[name]["tokens"]))
        assert output["tokens"] == right[name]["tokens"][:n]
        assert output["logprobs"] == pytest.approx(right[name]["logprobs"][:n], abs=1e-4)


@pytest.mark.parametrize(
    ("processes", "devices", "stages", "tensor"),
    [
        pytest.param(2, 1, 2, 1, id="a stage in each of two"),
        pytest.param(2, 1, 1, 2, id="a stage across two"),
        pytest.param(2, 3, 3, 2, id="two stages share each of two, one across both"),
        pytest.param(2, 2, 3, 1, id="two stages in the first of two, one in the other"),
        pytest.param(4, 1, 2, 2, id="two stages, each across two of four"),
        pytest.param(3, 1, 3, 1, id="a stage in each of three"),
        pytest.param(4, 1, 4, 1, id="a stage in each of four"),
        pytest.param(3, 3, 4, 2, id="four stages in three, one across two of them", marks=pytest.mark.slow),
    ],
)
def test_several_processes_give_the_tokens_of_one(start, right, processes, devices, stages, tensor):
    aborted = sorted(name for name, output in right.items() if len(output["tokens"]) > 3)[:3]
    with start(processes, devices, stages, tensor, rounds=2, aborts=aborted) as nodes:
        assert nodes.wait() == [0] * processes, nodes.report()
        rounds = nodes.master.said("round")
        assert nodes.master.said("in flight") == [stages]
        assert all(not worker.lines for worker in nodes.processes[1:])  # none but process 0 gets past LLM()
    check_same(rounds[0], right, aborted)
    check_same(rounds[1], right, aborted)


def test_closing_ends_the_workers_and_gives_the_memory_back_while_process_0_goes_on(start):
    with start(2, 1, 2, 1, close=True) as nodes:
        assert nodes.master.wait_for("closed"), nodes.report()
        assert nodes.processes[1].popen.wait(60) == 0, nodes.report()
        assert nodes.master.popen.poll() is None
        nodes.master.popen.stdin.close()
        assert nodes.wait() == [0, 0], nodes.report()
        assert nodes.master.said("still here") == [0]


class TestLoss:
    @pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
    @pytest.mark.parametrize(
        "seed", [pytest.param(seed, marks=() if seed < 3 else pytest.mark.slow) for seed in range(20)]
    )
    def test_a_worker_that_is_lost_ends_all_with_an_error_that_names_it(self, start, right, signum, seed):
        draw = random.Random(f"{seed} {signum}")
        processes, stages, tensor = ((2, 2, 1), (2, 1, 2), (3, 3, 1))[seed % 3]
        victim = draw.randrange(1, processes)
        with start(processes, 1, stages, tensor, rounds=10**6) as nodes:
            assert nodes.master.wait_for("ready"), nodes.report()
            time.sleep(draw.uniform(0, 2))
            lost = nodes.processes.pop(victim)
            lost.popen.send_signal(signum)
            assert nodes.wait() == [EXIT_LOST] * (processes - 1), nodes.report()
            assert signum == signal.SIGKILL or lost.popen.poll() is None
            nodes.processes.append(lost)  # to be killed
            (error,) = nodes.master.said("error")
            (again,) = nodes.master.said("again")
            rounds = nodes.master.said("round")
            logs = [process.log.read_text() for process in nodes.processes]
        assert error.startswith(f"process {victim} has ")
        assert again.startswith("the engine has stopped after ProcessLost")
        assert error in again
        assert all(error in log for log in logs[:-1])
        for outputs in rounds:
            check_same(outputs, right)

    def test_a_worker_that_is_lost_before_the_engine_is_ready(self, start):
        with start(2, 1, 2, 1, fault="worker build") as nodes:
            assert nodes.wait() == [EXIT_LOST, -signal.SIGKILL], nodes.report()
            assert "ProcessLost: process 1 has closed its connection" in nodes.master.log.read_text()
            assert not nodes.master.lines

    def test_workers_leave_when_the_master_dies(self, start):
        with start(2, 1, 2, 1, rounds=10**6) as nodes:
            assert nodes.master.wait_for("ready"), nodes.report()
            nodes.master.popen.kill()
            _, status = nodes.wait()
            # Whoever notices first: this engine, or JAX, which aborts.
            assert status in (EXIT_LOST, -signal.SIGABRT), nodes.report()

    def test_a_worker_that_fails_is_named_with_its_error(self, start):
        with start(2, 1, 2, 1, rounds=10**6, fault="worker dispatch") as nodes:
            assert nodes.wait() == [EXIT_LOST, EXIT_FAILED], nodes.report()
            (error,) = nodes.master.said("error")
        assert error == "process 1 has failed: RuntimeError('planted')"

    def test_a_device_that_hangs_while_its_process_lives_ends_all(self, start):
        change = {0: {"iteration_timeout_s": 3.0}}
        with start(2, 1, 2, 1, fault="worker device", change=change) as nodes:
            assert nodes.wait() == [EXIT_LOST, EXIT_LOST], nodes.report()
            (error,) = nodes.master.said("error")
        expected = "process 1 has not finished iteration 0 within 3 s: a device or a transfer hangs"
        assert error == expected

    @pytest.mark.parametrize("fault", ["tokens", "plan"])
    def test_a_worker_that_diverges_is_named_with_the_iteration(self, start, fault):
        with start(2, 1, 1, 2, rounds=10**6, fault=f"worker {fault}") as nodes:
            assert nodes.wait() == [EXIT_LOST, EXIT_FAILED], nodes.report()
            (error,) = nodes.master.said("error")
        expected = f"process 1 has failed: it has diverged: its {fault} of iteration 5 "
        assert error.startswith(expected)


def test_an_iteration_that_fails_is_recomputed_in_every_process(start, right):
    """The last stage is in process 1, and iterations were in flight when the outputs of one were lost."""
    with start(2, 1, 2, 1, fault="master collect") as nodes:
        assert nodes.wait() == [0, 0], nodes.report()
        (outputs,) = nodes.master.said("round")
        assert "an iteration failed, all requests are recomputed" in nodes.master.log.read_text()
    check_same(outputs, right)


def test_foreign_bytes_on_the_control_port_change_nothing(start, right):
    with start(2, 1, 2, 1, rounds=20) as nodes:
        assert nodes.master.wait_for("ready"), nodes.report()
        host, port = nodes.control.split(":")
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 200, bytes(200)):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(data)
        assert nodes.wait() == [0, 0], nodes.report()
        assert "a connection to the control port has ended" in nodes.master.log.read_text()
        rounds = nodes.master.said("round")
    for outputs in rounds:
        check_same(outputs, right)


def test_another_option_is_refused_on_both_sides(start):
    with start(2, 1, 2, 1, change={1: {"page_size": 8}}) as nodes:
        statuses = nodes.wait()
        assert all(statuses), nodes.report()
        for process in nodes.processes:
            text = "process 1 does not fit: engine.cache.page_size is 8 there and 4 in process 0"
            assert text in process.log.read_text(), nodes.report()


def test_another_secret_is_refused(start, tmp_path):
    (tmp_path / "other").write_text("not what the others know")
    change = {0: {"start_timeout_s": 15}, 1: {"secret_file": str(tmp_path / "other")}}
    with start(2, 1, 2, 1, change=change) as nodes:
        statuses = nodes.wait()
        assert all(statuses), nodes.report()
        assert "is the secret in its secret_file the same?" in nodes.processes[1].log.read_text()
        assert "processes [1] have not come within 15 s" in nodes.master.log.read_text()


@pytest.mark.parametrize(("processes", "stages"), [(2, 2), (3, 3)])
def test_every_process_must_have_a_device_to_run(start, processes, stages):
    with start(processes, 2, stages, 1) as nodes:
        assert all(nodes.wait()), nodes.report()
        text = f"must use a device of each of the {processes} processes, but {stages} * 1 leaves processes "
        assert text + f"[{processes - 1}]" in nodes.master.log.read_text(), nodes.report()


def test_generate_and_worker_are_one_engine(start, right):
    ids = ",".join(map(str, make_requests(1)[0].prompt_ids))
    generate = ["generate", "MODEL", "--token-ids", "--max-tokens", "5", "--temperature", "0", "--json", ids]
    with start(2, 1, 2, 1, commands=[generate, ["worker", "MODEL"]]) as nodes:
        assert nodes.wait() == [0, 0], nodes.report()
        (printed,) = nodes.master.said("answer")
    (output,) = printed
    assert output["token_ids"] == right["r0"]["tokens"][:5]


def test_a_trace_is_measured_on_several_processes(start):
    lengths = ["--input-tokens", "2", "4", "--output-tokens", "2", "2"]
    engine = ["--policy", "orca", "--max-batch-size", "4", "--closed", "--num-requests", "6"]
    command = ["bench", "trace", "--model", "MODEL", *lengths, *engine]
    with start(2, 1, 2, 1, commands=[command, command]) as nodes:
        assert nodes.wait() == [0, 0], nodes.report()
        (printed,) = nodes.master.said("answer")
    *_, point = printed
    assert (point["policy"], point["max_batch_size"], point["num_requests"]) == ("orca", 4, 6)
