"""One process of a group: run with a JSON object of what to do. In process 0 it prints what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import itertools
import json
import os
import random
import signal
import sys
import time
from typing import Any

import click
import jax

from jorca import LLM, JorcaError, Request, SamplingParams
from jorca.cli import main as jorca
from jorca.engine import worker
from jorca.engine.distributed import DistributedExecutor
from jorca.engine.executor import LocalExecutor
from jorca.engine.programs import use_compilation_cache
from jorca.engine.wire import RunningDigest

VARIETY = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=9),
    SamplingParams(temperature=1.1, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={36: 1.0, 0: -2.0}),
    SamplingParams(temperature=0, logprobs=3, min_tokens=2, stop_token_ids=(5,)),
]


def make_requests(number: int, max_tokens: int = 10) -> list[Request]:
    """Greedy and sampled ones of mixed lengths."""
    draw = random.Random(3)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(draw.randrange(37) for _ in range(draw.randint(1, 12))),
            params=dataclasses.replace(
                VARIETY[i % len(VARIETY)], max_tokens=draw.randint(4, max_tokens), seed=i
            ),
        )
        for i in range(number)
    ]


def serve(llm: LLM, requests: list[Request], seed: int = 0, aborts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Runs requests that arrive at random, and aborts some; returns tokens and log-probabilities by id."""
    draw = random.Random(seed)
    coming, outputs = list(requests), {}
    while coming or llm.engine.has_work:
        for _ in range(min(draw.randrange(3), len(coming))):
            llm.engine.submit(coming.pop(0))
        for output in llm.engine.step():
            if output.request_id in aborts and len(output.token_ids) >= 2 and not output.finished:
                output = llm.engine.abort(output.request_id)
            if output is not None and output.finished:
                logprobs = [p.logprob for p in output.logprobs or ()]
                outputs[output.request_id] = {"tokens": list(output.token_ids), "logprobs": logprobs}
    llm.engine.scheduler.check_integrity()
    return outputs


def main(task: dict[str, Any]) -> None:
    faulthandler.register(signal.SIGUSR1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", task["devices"])
    use_compilation_cache(task["cache"])
    if task["commands"]:
        return run_command(task)
    plant(task["fault"], task["options"]["process_id"])
    llm = LLM(task["model"], **task["options"])
    say("ready")
    requests = make_requests(task["requests"])
    try:
        for number in range(task["rounds"]):
            say("round", serve(llm, requests, seed=number, aborts=tuple(task["aborts"])))
    except JorcaError as error:
        say("error", str(error))
        try:
            llm.generate([[1, 2]])
        except JorcaError as again:
            say("again", str(again))
        raise
    say("in flight", llm.engine.scheduler.limits.max_in_flight)
    if task["close"]:
        llm.close()
        say("closed")
        sys.stdin.read()  # until the test has seen how the workers end
        say("still here", sum(x.nbytes for x in jax.live_arrays()))
    return None


def run_command(task: dict[str, Any]) -> None:
    """Runs `jorca` with those of the options that the command has; it says what it printed, line by line."""
    words = task["commands"][task["options"]["process_id"]]
    words = [task["model"] if word == "MODEL" else word for word in words]
    command, names = jorca, list(words)
    while isinstance(command, click.Group):
        command = command.commands[names.pop(0)]
    known = {parameter.name for parameter in command.params}
    for name, value in task["options"].items():
        if name in known:
            words += [f"--{name.replace('_', '-')}", str(value)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jorca(words, standalone_mode=False)
    say("answer", [json.loads(line) for line in printed.getvalue().splitlines()])


def plant(fault: str | None, process: int) -> None:
    """Makes something go wrong in one of the processes, once, at iteration 5."""
    if fault is None or fault.startswith("worker") != (process == 1):
        return
    match fault:
        case "worker dispatch":
            owner, name = LocalExecutor, "dispatch"
        case "worker plan":
            owner, name = RunningDigest, "add_plan"
        case "worker tokens":
            owner, name = RunningDigest, "add_tokens"
        case "master collect":
            owner, name = DistributedExecutor, "collect"
        case "worker device":
            return setattr(LocalExecutor, "fetch", lambda *_: time.sleep(10**6))
        case "worker build":
            return setattr(worker, "build_stages", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        case _:
            raise ValueError(fault)
    calls, plain = itertools.count(), getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if next(calls) != 5:
            return result
        if isinstance(result, bytes):
            return b"something else"
        raise RuntimeError("planted")

    setattr(owner, name, faulty)


def say(what: str, value: Any = None) -> None:
    print(json.dumps([what, value]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
