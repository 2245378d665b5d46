"""`jorca generate`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jorca.cli.options import engine_options, given

if TYPE_CHECKING:
    from jorca.checkpoint import OpenCheckpoint
    from jorca.config import EngineConfig
    from jorca.output import RequestOutput
    from jorca.request import SamplingParams


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("prompts", nargs=-1)
@click.option("--prompt-file", type=click.File(), help="One prompt a line, after those given; - is stdin.")
@click.option("--token-ids", is_flag=True, help="Prompts are token ids with commas between them.")
@click.option("--max-tokens", type=int, default=16, show_default=True)
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="0 keeps every token.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--stop", multiple=True, help="Ends the text; may be given several times.")
@click.option("--n", type=int, default=1, show_default=True, help="Samples of each prompt.")
@click.option("--ignore-eos", is_flag=True, help="Goes on behind the end-of-text token.")
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--presence-penalty", type=float, default=0.0, show_default=True)
@click.option("--frequency-penalty", type=float, default=0.0, show_default=True)
@click.option("--logit-bias", multiple=True, metavar="ID=VALUE", help="Adds to a token's logit; repeatable.")
@click.option("--min-tokens", type=int, default=0, help="No end before so many tokens.")
@click.option("--logprobs", type=int, help="With --json: so many best tokens beside each chosen one.")
@click.option("--prompt-logprobs", type=int, help="With --json: the same for the prompt's tokens.")
@click.option("--json", "as_json", is_flag=True, help="Prints one JSON line for each finished request.")
@click.option("--timeline", is_flag=True, help="Draws which requests shared which iterations.")
@click.option("--record", type=click.Path(path_type=Path), help="Writes the scheduler's calls to a new file.")
@engine_options
def generate(
    checkpoint: Path,
    prompts: tuple[str, ...],
    prompt_file: Any,
    token_ids: bool,
    as_json: bool,
    timeline: bool,
    record: Path | None,
    **options: Any,
) -> None:
    """Answers PROMPTS with the model in CHECKPOINT.

    CHECKPOINT is a folder that `jorca convert` made, or anything that it reads, converted while it is loaded.
    All prompts run together. A single one streams; of several, each is printed when it is done.
    """
    from jorca.checkpoint import open_checkpoint
    from jorca.config import EngineConfig
    from jorca.request import SamplingParams
    from jorca.timeline import Timeline

    texts = [*prompts, *([] if prompt_file is None else prompt_file.read().splitlines())]
    if not texts:
        raise click.UsageError("give at least one prompt, or --prompt-file")
    options["logit_bias"] = [_bias(text) for text in options["logit_bias"]]
    names = {field.name for field in dataclasses.fields(SamplingParams)} & set(options)
    params = SamplingParams(**_checked({name: options.pop(name) for name in names}, SamplingParams))
    asked = [_ids(text) if token_ids else text for text in texts]
    options = given(options)
    opened = open_checkpoint(checkpoint)
    _refuse_early(opened, asked, params, EngineConfig.from_options(**options))
    from jorca.engine.llm import LLM

    watch = Timeline()
    with LLM(opened, record=record, **options) as llm:
        llm.engine.observe(watch)
        _print_outputs(llm, asked, params, as_json)
    if timeline:
        _draw(watch)


def _refuse_early(
    opened: OpenCheckpoint, prompts: list[Any], params: SamplingParams, config: EngineConfig
) -> None:
    """Raises what is wrong with the prompts, as far as it shows without JAX and an engine."""
    from jorca.engine.sizing import derive_sizes
    from jorca.frontend.inputs import InputProcessor
    from jorca.frontend.text import Tokenizer

    tokenizer = None if opened.tokenizer is None else Tokenizer(opened.tokenizer)
    limits = derive_sizes(opened.config, config).limits
    InputProcessor(opened.config, tokenizer, limits).requests(prompts, params)


def _checked(values: dict[str, Any], kind: type[SamplingParams]) -> dict[str, Any]:
    """Returns `values` if they make a SamplingParams; one clear line if they do not."""
    try:
        kind(**values)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return values


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--token-ids needs ids with commas between them, got {text!r}") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise click.UsageError(f"--logit-bias needs ID=VALUE, got {text!r}") from None


def _print_outputs(llm: Any, prompts: list[Any], params: SamplingParams, as_json: bool) -> None:
    streaming = len(prompts) == 1 and params.n == 1 and not as_json
    for output in llm.stream(prompts, params):
        if streaming:
            click.echo(
                output.new_text if llm.tokenizer else " ".join(map(str, output.new_token_ids)), nl=False
            )
        if not output.finished:
            continue
        if as_json:
            click.echo(json.dumps(_as_json(output)))
        elif streaming:
            click.echo()
        else:
            answer = output.text if llm.tokenizer else ",".join(map(str, output.token_ids))
            click.echo(f"{output.request_id}: {answer}")
        if output.error is not None:
            click.echo(f"{output.request_id} failed: {output.error}", err=True)


def _as_json(output: RequestOutput) -> dict[str, Any]:
    names = (
        "request_id",
        "sample",
        "seed",
        "prompt_ids",
        "token_ids",
        "text",
        "finish_reason",
        "stop_reason",
        "error",
    )
    fields = {name: getattr(output, name) for name in names}
    for name in ("logprobs", "prompt_logprobs"):
        logprobs = getattr(output, name)
        fields[name] = logprobs and [p and dataclasses.asdict(p) for p in logprobs]
    return fields | {"metrics": output.metrics._asdict()}


def _draw(watch: Any) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print(watch.picture(str, lambda output: str(output.finish_reason), console.width))
