"""`deploy/jorca.slurm`, run for real; stand-ins for srun and scontrol start its tasks on this machine."""

import os
import re
import signal
import stat
import subprocess
import sys

import pytest

from deploy.files import GUIDE, ROOT, SLURM, parse
from jorca.sharding.hosts import EXIT_FAILED, EXIT_LOST
from multiprocess.group import PATIENCE_S

ON_PATH = {
    "srun": f'exec "{sys.executable}" -S "{ROOT}/tests/deploy/srun.py" "$@"',
    "scontrol": '[ "$*" = "getaddrs node7" ] && echo "node7: 127.0.0.1:6818"',
    "jorca": f'exec "{sys.executable}" -m jorca.cli "$@"',
    "python": f'exec "{sys.executable}" "$@"',
}
SHOW = r"""
printf '%s\n' "$@" >"arguments-$SLURM_PROCID"
printf '%s' "$JAX_COORDINATOR_BIND_ADDRESS" >"bind-$SLURM_PROCID"
for word; do
  if [ "$before" = --secret-file ]; then cp -p "$word" "secret-$SLURM_PROCID"; fi
  before=$word
done
"""
MEET_FATE = r"""
echo >>"starts-$SLURM_PROCID"
fate=$(sed -n "$(wc -l <"starts-$SLURM_PROCID")p" "fates-$SLURM_PROCID")
case $fate in
-*) kill "$fate" $$ ;;
*) exit "$fate" ;;
esac
"""
LOSE_A_WORKER_ONCE = """
import os, pathlib, signal
from jorca.engine import worker

lost = pathlib.Path("lost")
if os.environ["SLURM_PROCID"] == "1" and not lost.exists():
    lost.touch()
    worker.build_stages = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def folder(tmp_path):
    """Where jobs are submitted; it has the checkpoints."""
    (tmp_path / "bin").mkdir()
    for name, line in ON_PATH.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    return tmp_path


@pytest.fixture
def submit(folder):
    """Runs a job as sbatch would, with what the script asks for."""
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", SLURM.read_text(), re.MULTILINE))
    assert directives["ntasks-per-node"] == "1"
    assert directives["nodes"] == "2"

    def submit(*command, job=4711):
        script = folder / "slurm_script"  # Slurm runs a copy
        script.write_bytes(SLURM.read_bytes())
        environment = {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NUM_NODES": directives["nodes"],
            "SLURM_CPUS_PER_TASK": directives["cpus-per-task"],
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURMD_NODENAME": "node7",
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_LOGGING_LEVEL": "INFO",
        }
        with subprocess.Popen(
            ["bash", script, *command],
            cwd=folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as popen:
            try:
                printed, errors = popen.communicate(timeout=PATIENCE_S)
            finally:
                if popen.poll() is None:
                    os.killpg(popen.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, popen.returncode, printed, errors)

    return submit


@pytest.fixture
def show(submit, folder):
    """Returns what each process of a job is given, in their order."""

    def show(*arguments, job=4711):
        ended = submit("sh", "-c", SHOW, "sh", *arguments, job=job)
        assert ended.returncode == 0, ended.stderr
        return [Given(folder, process) for process in (0, 1)]

    return show


class Given:
    """What a process has been given, as it has written it down."""

    def __init__(self, folder, process):
        self.arguments = (folder / f"arguments-{process}").read_text().splitlines()
        self.options = parse(self.arguments)
        self.bind = (folder / f"bind-{process}").read_text()
        secret = folder / f"secret-{process}"
        self.secret, self.mode = secret.read_text(), stat.S_IMODE(secret.stat().st_mode)
        secret.unlink()


def report(folder, ended):
    """Everything that a job has said."""
    logs = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("*.log")))
    return f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}\n{logs}"


def test_it_is_a_script():
    subprocess.run(["bash", "-n", SLURM], check=True)


def test_without_a_command_it_says_how_to_use_it(submit):
    ended = submit()
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: sbatch deploy/jorca.slurm COMMAND")


def test_processes_are_given_the_command_and_differ_in_their_number_alone(show):
    first, second = show("generate", "a model", "85 50", "--stages", "2")
    assert first.arguments[:5] == ["generate", "a model", "85 50", "--stages", "2"]
    assert (first.options.pop("process_id"), second.options.pop("process_id")) == ("0", "1")
    assert first.options == second.options
    assert first.options["num_processes"] == "2"
    assert first.options["coordinator"].startswith("127.0.0.1:")
    assert first.bind == first.options["coordinator"]


def test_jobs_with_neighbouring_numbers_have_ports_of_their_own_below_those_that_linux_hands_out(show):
    ports = set()
    for job in (4999, 5000, 5001):
        port = int(show("worker", "a model", job=job)[0].options["coordinator"].split(":")[1])
        ports |= {port, port + 1}
    assert len(ports) == 6
    assert all(20000 <= port < 32768 for port in ports)


def test_a_job_has_a_secret_of_its_own_that_is_gone_afterwards(show):
    secrets = []
    for _ in range(2):
        first, second = show("worker", "a model")
        assert re.fullmatch("[0-9a-f]{64}\n", first.secret)
        assert second.secret == first.secret
        assert first.mode == 0o600
        assert not os.path.exists(first.options["secret_file"])
        secrets.append(first.secret)
    assert secrets[0] != secrets[1]


@pytest.mark.parametrize(
    ("fates", "status"),
    [
        pytest.param([(0, 0)], 0, id="done"),
        pytest.param([(EXIT_LOST, EXIT_FAILED), (0, 0)], 0, id="a worker fails once"),
        pytest.param([(EXIT_FAILED, EXIT_LOST), (0, 0)], 0, id="process 0 fails once"),
        pytest.param([(EXIT_LOST, -signal.SIGKILL), (-signal.SIGABRT, 0), (0, 0)], 0, id="killed, aborted"),
        pytest.param([(EXIT_LOST, EXIT_FAILED)] * 4, EXIT_LOST, id="it fails always"),
        pytest.param([(1, 0)], 1, id="the command fails"),
        pytest.param([(2, 2)], 2, id="a wrong option"),
    ],
)
def test_all_processes_are_started_again_if_one_is_lost_but_not_for_the_commands_own_errors(
    submit, folder, fates, status
):
    for process, own in enumerate(zip(*fates, strict=True)):
        (folder / f"fates-{process}").write_text("".join(f"{int(fate)}\n" for fate in own))
    ended = submit("sh", "-c", MEET_FATE)
    assert ended.returncode == status, ended.stderr
    assert [(folder / f"starts-{process}").read_text() for process in (0, 1)] == ["\n" * len(fates)] * 2


@pytest.mark.multiprocess
def test_the_command_of_the_guide_adds(submit, folder):
    guide = " ".join(GUIDE.read_text().replace("\\\n", " ").split())
    (command,) = re.findall(r"deploy/jorca\.slurm (jorca generate .*? --stages 2)", guide)
    ended = submit(*command.split(), "--compilation-cache-dir", "cache")
    assert ended.returncode == 0, report(folder, ended)
    assert "531" in ended.stdout.splitlines()  # 85 + 50, units first


@pytest.mark.multiprocess
def test_the_script_of_the_guide_adds_after_a_worker_was_terminated(submit, folder):
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (folder / "add.py").write_text(LOSE_A_WORKER_ONCE + script)
    ended = submit("python", "add.py")
    assert ended.returncode == 0, report(folder, ended)
    assert [line for line in ended.stdout.splitlines() if line.isdecimal()] == ["135", "046"]
    assert f"start 1 of 4 ended with status {128 + signal.SIGTERM}" in ended.stderr
    logs = [(folder / f"jorca-4711-{process}.log").read_text() for process in (0, 1)]
    assert "process 1 has closed its connection" in logs[0]
    for log in logs:
        assert "Connecting to JAX distributed service" in log  # the log in which JAX says whom it gives what
        assert "visible devices" not in log, "a process has all GPUs of its host"
