"""Stands in for Slurm's srun: runs the tasks of a step on this machine, with the variables that Slurm sets.

It knows the options that `deploy/jorca.slurm` uses, with the meaning that srun(1) gives them, and no others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--kill-on-bad-exit", choices=["0"], required=True)
    parser.add_argument("--wait", type=float, required=True)
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--error", required=True)
    parser.add_argument("--open-mode", choices=["append"], required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    tasks = []
    for task in range(number := int(os.environ["SLURM_JOB_NUM_NODES"])):
        step = {
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_NTASKS": str(number),
            "SLURM_PROCID": str(task),
            "SLURM_NODEID": str(task),
            "SLURM_LOCALID": "0",
        }
        with open(options.error.replace("%t", str(task)), "ab") as log:
            tasks.append(subprocess.Popen(options.command, stderr=log, env=os.environ | step))
    wait_for_all(tasks, options.wait)
    return max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks)


def wait_for_all(tasks: list[subprocess.Popen[bytes]], wait_s: float) -> None:
    """Waits for all tasks; so long after the first has ended, the others are killed."""
    kill_s = None
    while running := [task for task in tasks if task.poll() is None]:
        if kill_s is None and len(running) < len(tasks):
            kill_s = time.monotonic() + wait_s
        if kill_s is not None and time.monotonic() > kill_s:
            for task in running:
                task.kill()
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
