"""The `jorca` command."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from jorca import __version__
from jorca.request import JorcaError

if TYPE_CHECKING:
    from jorca.request import RequestOutput, SamplingParams

# JAX is imported inside the commands, so that `jorca --help` answers at once.


class _Commands(click.Group):
    """Prints jorca's own errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except JorcaError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jorca")
@click.option("-v", "--verbose", count=True, help="Log what the engine does; twice for every iteration.")
def main(verbose: int) -> None:
    """Serves GPT models iteration by iteration, after Orca (OSDI 2022)."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jorca").setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


compilation_cache_option = click.option(
    "--compilation-cache-dir",
    default=str(Path(platformdirs.user_cache_dir("jorca")) / "xla"),
    show_default=True,
    help="Where compiled programs are kept for the next start.",
)


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of the engine, named as the fields of the configs."""
    options = [
        click.option("--max-batch-size", type=int, help="Most requests in one iteration.  [default: 8]"),
        click.option("--max-batch-tokens", type=int, help="Most tokens in one iteration."),
        click.option("--min-bucket", type=int, help="Smallest compiled batch, in tokens.  [default: 1]"),
        click.option("--page-size", type=int, help="Token positions in a KV page.  [default: 64]"),
        click.option("--num-pages", type=int, help="Pages of the KV array."),
        click.option("--kv-memory-bytes", type=int, help="Bytes of the KV array, instead of --num-pages."),
        click.option("--attention", help="auto, xla or reference.  [default: auto]"),
        compilation_cache_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
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
@engine_options
def generate(
    checkpoint: Path,
    prompts: tuple[str, ...],
    prompt_file: Any,
    token_ids: bool,
    as_json: bool,
    timeline: bool,
    **options: Any,
) -> None:
    """Answers PROMPTS with the model in CHECKPOINT.

    All prompts run together. A single one streams; of several, each is printed when it is done.
    """
    from jorca.engine.llm import LLM
    from jorca.request import SamplingParams
    from jorca.timeline import Timeline

    texts = [*prompts, *([] if prompt_file is None else prompt_file.read().splitlines())]
    if not texts:
        raise click.UsageError("give at least one prompt, or --prompt-file")
    options["logit_bias"] = [_bias(text) for text in options["logit_bias"]]
    names = {field.name for field in dataclasses.fields(SamplingParams)} & set(options)
    params = SamplingParams(**_checked({name: options.pop(name) for name in names}, SamplingParams))
    llm = LLM(checkpoint, **{name: value for name, value in options.items() if value is not None})
    watch = Timeline()
    llm.engine.observe(watch)
    _print_outputs(llm, [_ids(text) if token_ids else text for text in texts], params, as_json)
    if timeline:
        _draw(watch)


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
    fields = dataclasses.asdict(output)
    for name in ("new_text", "new_token_ids", "logits"):
        del fields[name]
    return fields


def _draw(watch: Any) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print(watch.picture(str, lambda output: str(output.finish_reason), console.width))


@main.group()
def convert() -> None:
    """Turns checkpoints of other programs into jorca's."""


@convert.command("mingpt")
@click.argument("src", type=click.Path(exists=True, path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--num-heads", type=int, help="If no config.json lies beside the weights.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: as stored.")
@click.option(
    "--tokenizer", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="tokenizer.json"
)
@click.option("--overwrite", is_flag=True, help="Replaces DST if it is there.")
def convert_mingpt_command(
    src: Path, dst: Path, num_heads: int | None, dtype: Any, tokenizer: Path | None, overwrite: bool
) -> None:
    """Converts minGPT's SRC (model.pt, or a folder with it and config.json) to the folder DST."""
    from jorca.checkpoint import convert_mingpt
    from jorca.model.params import num_params

    config = convert_mingpt(
        src, dst, num_heads=num_heads, dtype=dtype, tokenizer_file=tokenizer, overwrite=overwrite
    )
    click.echo(
        f"{dst}: {num_params(config):,} weights, {config.num_layers} layers, {config.num_heads} heads, "
        f"width {config.d_model}, vocabulary {config.vocab_size}, {config.dtype}"
    )


@main.group()
def bench() -> None:
    """Measures, after the paper's protocols; prints JSON lines."""


@bench.command("trace")
@click.option("--model", default="small", show_default=True, help="small, a preset's name, or a checkpoint.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of random weights.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(["orca", "request-level", "shortest-prompt"]),
    default=["orca", "request-level", "shortest-prompt"],
    show_default=True,
    help="shortest-prompt is request-level with FasterTransformer's first pass.",
)
@click.option("--max-batch-size", "sizes", type=int, multiple=True, default=[8, 32], show_default=True)
@click.option("--max-batch-tokens", type=int, help="Most tokens in one iteration.")
@click.option(
    "--input-tokens", type=int, nargs=2, help="Shortest, longest prompt.  [default: 32 512; small: 8 64]"
)
@click.option(
    "--output-tokens", type=int, nargs=2, help="Fewest, most generated.  [default: 1 128; small: 1 32]"
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--closed", is_flag=True, help="All requests arrive at once; prints tokens/s for each engine.")
@click.option("--num-requests", type=click.IntRange(1), help="With --closed.  [default: 32]")
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    help="Requests/s that arrive.  [default: shares of the most that the engine can do]",
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), help="Of arrivals at each rate.  [default: 3]"
)
@click.option("--target-ms", type=float, help="Where to compare.  [default: 3 times that of a lone request]")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draws the figure; needs matplotlib."
)
@compilation_cache_option
def bench_trace(policies: tuple[str, ...], sizes: tuple[int, ...], **options: Any) -> None:
    """Measures latency against throughput as the paper's figure 10 does, orca beside request-level."""
    from jorca.bench.trace import run

    run([(policy, size) for policy in policies for size in sizes], **options)


@bench.command("iteration")
@click.option("--model", default="gpt2", show_default=True, help="small, a preset's name, or a checkpoint.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of random weights.")
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    default=[1, 2, 4, 8, 16, 32],
    show_default=True,
)
@click.option("--input-tokens", type=click.IntRange(2), multiple=True, default=[32, 128], show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Timed runs of each.")
@click.option("--full-context", is_flag=True, help="The baseline reserves a full context for each request.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draws the figure; needs matplotlib."
)
@click.option(
    "--table", type=click.Path(dir_okay=False, path_type=Path), help="Writes what iterations cost, instead."
)
@engine_options
def bench_iteration(**options: Any) -> None:
    """Times batches of like requests without a scheduler, as the paper's figure 9 does.

    Selective batching runs beside one padded batch with batched attention. With --table, iterations of all
    kinds are timed instead, and a table of their costs is written; the engine's options say which can be.
    """
    from jorca.bench.iteration import run

    run(**options)


@main.command()
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("checkpoints/adder"),
    show_default=True,
)
@click.option("--num-sums", type=click.IntRange(1), default=40, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@compilation_cache_option
@click.pass_context
def demo(ctx: click.Context, checkpoint: Path, num_sums: int, seed: int, compilation_cache_dir: str) -> None:
    """Serves a few dozen sums at once and draws how they shared iterations."""
    from rich.console import Console

    from jorca.demo import run_demo

    if not run_demo(
        checkpoint,
        Console(),
        num_sums=num_sums,
        seed=seed,
        compilation_cache_dir=compilation_cache_dir,
    ):
        ctx.exit(1)


@main.command()
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Prints versions and devices, says which attention runs and why, and checks it against the reference."""
    from rich.console import Console

    from jorca.doctor import run_doctor

    if not run_doctor(Console()):
        ctx.exit(1)


if __name__ == "__main__":
    main()
