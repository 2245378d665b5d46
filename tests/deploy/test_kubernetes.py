"""`deploy/kubernetes.yaml`: its parts agree with each other and with jorca; its command runs here."""

import os
import re
import subprocess
import sys

import pytest

from deploy.files import MANIFEST, ROOT, parse, read_manifest
from jorca.config import EngineConfig
from multiprocess.group import PATIENCE_S, free_port


@pytest.fixture(scope="module")
def jobset():
    return read_manifest()[0]


@pytest.fixture(scope="module")
def hosts(jobset):
    (hosts,) = jobset["spec"]["replicatedJobs"]
    return hosts


@pytest.fixture(scope="module")
def pod(hosts):
    return hosts["template"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod):
    (container,) = pod["containers"]
    return container


def command_of(container, **variables):
    """Returns the container's command as Kubernetes expands it, with `$(NAME)` for variables."""
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in words]


def test_it_holds_a_jobset_and_a_network_policy():
    assert [(part["apiVersion"], part["kind"]) for part in read_manifest()] == [
        ("jobset.x-k8s.io/v1alpha2", "JobSet"),
        ("networking.k8s.io/v1", "NetworkPolicy"),
    ]


def test_there_are_as_many_pods_as_processes_and_process_0_is_the_coordinator(jobset, hosts, container):
    jobs = hosts["template"]["spec"]
    assert (hosts["replicas"], jobs["completionMode"]) == (1, "Indexed")
    assert jobset["spec"]["coordinator"] == {"replicatedJob": hosts["name"], "jobIndex": 0, "podIndex": 0}
    assert [variable["name"] for variable in container["env"]] == ["COORDINATOR"]
    _, *arguments = command_of(container, COORDINATOR="jorca-hosts-0-0.jorca", JOB_COMPLETION_INDEX="1")
    options = parse(arguments)
    assert int(options["num_processes"]) == jobs["completions"] == jobs["parallelism"]
    assert options["process_id"] == "1"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(options["stages"]) * int(options["tensor"]) == jobs["completions"] * gpus


def test_jorca_takes_the_options(container):
    _, *arguments = command_of(container, COORDINATOR="jorca-hosts-0-0.jorca", JOB_COMPLETION_INDEX="1")
    given = parse(arguments)
    numbers = {name: int(given[name]) for name in ("num_processes", "process_id", "stages", "tensor")}
    texts = {name: given[name] for name in ("coordinator", "control", "secret_file", "compilation_cache_dir")}
    config = EngineConfig.from_options(**numbers, **texts, start_timeout_s=float(given["start_timeout_s"]))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.hosts.coordinator == f"jorca-hosts-0-0.jorca:{ports['coordinator']}"
    assert config.hosts.control_address == f"jorca-hosts-0-0.jorca:{ports['control']}"


def test_files_that_the_command_names_are_mounted_and_the_secret_is_the_one_that_is_made(pod, container):
    _, *arguments = command_of(container, COORDINATOR="a.b", JOB_COMPLETION_INDEX="0")
    options = parse(arguments)
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    assert options["compilation_cache_dir"] in mounts
    (made,) = re.findall(r"kubectl create secret generic (\S+) --from-file=(\S+)=", MANIFEST.read_text())
    folder, _, key = options["secret_file"].rpartition("/")
    secret = volumes[mounts[folder]["name"]]["secret"]
    assert (secret["secretName"], key) == made
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_one_lost_pod_starts_all_again_and_the_commands_own_errors_none(jobset, hosts, pod, container):
    jobs = hosts["template"]["spec"]
    assert (jobs["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    policy = jobset["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert policy["maxRestarts"] > 0
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (own,) = jobs["podFailurePolicy"]["rules"]
    assert own["action"] == "FailJob"
    expected = {"containerName": container["name"], "operator": "In", "values": [1, 2]}
    assert own["onExitCodes"] == expected


def test_the_network_policy_lets_the_groups_pods_talk_to_each_other_alone(jobset):
    _, policy = read_manifest()
    # The label that the JobSet controller puts on every pod.
    group = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}}
    spec = policy["spec"]
    assert spec["podSelector"] == group
    assert sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
    assert spec["ingress"] == [{"from": [{"podSelector": group}]}]
    inside, names = spec["egress"]
    assert inside == {"to": [{"podSelector": group}]}
    assert {(port["protocol"], port["port"]) for port in names["ports"]} == {("UDP", 53), ("TCP", 53)}


@pytest.mark.multiprocess
def test_the_command_adds(container, tmp_path):
    """Both pods' commands, here: addresses and mounted paths are the only words that change."""
    (tmp_path / "secret").write_text("0" * 64)
    here = {"/models": ROOT / "checkpoints", "/run/jorca": tmp_path, "/cache": tmp_path / "cache"}
    here |= {f":{port['containerPort']}": f":{free_port()}" for port in container["ports"]}
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    pods = []
    for index in range(2):
        words = command_of(container, COORDINATOR="127.0.0.1", JOB_COMPLETION_INDEX=str(index))
        _, *arguments = [re.sub("|".join(here), lambda match: str(here[match[0]]), word) for word in words]
        pods.append(
            subprocess.Popen(
                [sys.executable, "-m", "jorca.cli", *arguments],
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [pod.communicate(timeout=PATIENCE_S)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert "531" in said[0].splitlines(), said  # 85 + 50, units first
