"""What a device holds on each mesh of up to eight, as the compiled programs say; prints a Markdown table.

python benchmarks/device_bytes.py
"""

from __future__ import annotations

import click
import jax

from jorca import EngineConfig, ModelConfig, init_params
from jorca.engine.build import build_stages
from jorca.engine.executor import StageRunner

MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)]


def held_bytes(runner: StageRunner) -> tuple[int, int, int]:
    """Returns the bytes of weights and KV array on one device of a stage, and the programs' scratch."""
    device = runner.stage.mesh.devices.flat[0]

    def here(tree: object) -> int:
        arrays = jax.tree.leaves(tree)
        return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device)

    programs = [program.memory_analysis() for program in runner.programs.values()]
    weights, cache = here(runner.params), here(runner.cache)
    for program in programs:  # the compiler's own account: weights, KV array, and little else
        rest = program.argument_size_in_bytes - weights - cache
        assert 0 <= rest < 0.02 * (weights + cache), "the program takes arrays that are not in the table"
    return weights, cache, max(program.temp_size_in_bytes for program in programs)


@click.command()
@click.option("--layers", default=8, show_default=True)
@click.option("--width", default=512, show_default=True)
@click.option("--positions", default=64, show_default=True)
def main(layers: int, width: int, positions: int) -> None:
    """Builds the engine's stages on every mesh, and compares bytes per device with an even share."""
    jax.config.update("jax_num_cpu_devices", 8)
    model = ModelConfig(vocab_size=64, max_positions=positions, num_layers=layers, num_heads=8, d_model=width)
    params = init_params(model)
    click.echo(f"{layers} layers, width {width}, float32; MB on the fullest device.\n")
    click.echo("| stages | tensor | weights | KV array | both | of an even share | scratch |")
    click.echo("|---:|---:|---:|---:|---:|---:|---:|")
    whole = 0
    for stages, tensor in MESHES:
        config = EngineConfig.from_options(
            stages=stages, tensor=tensor, max_batch_size=8, max_batch_tokens=64, min_bucket=64, num_pages=64
        )
        runners = build_stages(model, params, config).executor.stages
        weights, cache, scratch = max(map(held_bytes, runners))
        whole = whole or weights + cache
        share = (weights + cache) * stages * tensor / whole
        sizes = (f"{x / 1e6:,.2f}" for x in (weights, cache, weights + cache))
        click.echo(f"| {stages} | {tensor} | {' | '.join(sizes)} | {share:.3f} | {scratch / 1e6:,.2f} |")


if __name__ == "__main__":
    main()
