"""One update: the state that it takes and gives, the optimizer, and where both lie on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jorca.config import ConfigError
from jorca.model.init import init_params
from jorca.model.params import param_table
from jorca.sharding import param_shardings
from jorca.training.config import TrainConfig
from jorca.training.loss import next_token_nll

_ADAM_BETAS: Final = (0.9, 0.99)

Step = Callable[["TrainState", Int[Array, "B S+1"]], tuple["TrainState", Float[Array, ""]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class TrainState:
    """What an update changes.

    Attributes:
      step: Updates done, an int32 scalar.
      params: Every weight of the parameter table by name, in float32.
      optimizer: Optax's state.
    """

    step: Int[Array, ""]
    params: dict[str, Float[Array, ...]]
    optimizer: Any


def make_mesh(config: TrainConfig) -> Mesh:
    """Returns a mesh with the axes "data" and "tensor" over the first devices.

    Raises:
      ConfigError: There are too few devices.
    """
    needed = config.data_parallel * config.tensor
    if needed > len(jax.devices()):
        raise ConfigError(
            f"data_parallel * tensor must be at most the number of devices, {len(jax.devices())}, "
            f"got {config.data_parallel} * {config.tensor}"
        )
    return Mesh(
        np.array(jax.devices()[:needed]).reshape(config.data_parallel, config.tensor),
        ("data", "tensor"),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns where a batch lies: its windows are split over the mesh's axis "data"."""
    return NamedSharding(mesh, PartitionSpec("data"))


def learning_rates(config: TrainConfig) -> optax.Schedule:
    """Returns the learning rate by update, from 0: a linear rise, then a cosine down to 0."""
    return optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup_steps, config.steps)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW behind a bound on the gradient's length (Loshchilov and Hutter, 2019)."""
    b1, b2 = _ADAM_BETAS
    # Matrices are what a fresh model draws at random; biases and norms are constant.
    table = param_table(config.model_config())
    matrices = {name: info.init in ("normal", "residual") for name, info in table.items()}
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(learning_rates(config), b1, b2, weight_decay=config.weight_decay, mask=matrices),
    )


def state_shapes(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Returns the state as `jax.ShapeDtypeStruct`s with their shardings.

    What belongs to a weight, Adam's moments too, lies where the weight does; the rest is on every device.
    """
    of_params = param_shardings(config.model_config(), mesh)
    whole = NamedSharding(mesh, PartitionSpec())

    def place(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = of_params.get(getattr(path[-1], "key", ""), whole)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map_with_path(place, jax.eval_shape(lambda: _fresh_state(config)))


def _shardings(shapes: TrainState) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, shapes)


def init_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Returns the state before the first update, laid out on the mesh."""
    return jax.jit(lambda: _fresh_state(config), out_shardings=_shardings(state_shapes(config, mesh)))()


def _fresh_state(config: TrainConfig) -> TrainState:
    params = init_params(dataclasses.replace(config.model_config(), dtype="float32"), config.seed)
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(config).init(params))


def make_step(config: TrainConfig, mesh: Mesh) -> Step:
    """Returns the compiled update: (state, batch) -> (next state, mean loss in nats per token).

    The state is donated. The batch, int32 [B, S + 1], holds windows whose last S tokens are the targets. The
    loss is that of the weights before the update, with dropout, which follows from seed and step.
    """
    model = config.model_config()
    optimizer = make_optimizer(config)

    def update(state: TrainState, windows: Int[Array, "B S+1"]) -> tuple[TrainState, Float[Array, ""]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)

        def mean_loss(params: dict[str, Array]) -> Float[Array, ""]:
            drop = nnx.Dropout(config.dropout, rngs=nnx.Rngs(dropout=key))
            return next_token_nll(model, params, windows[:, :-1], windows[:, 1:], drop=drop).mean()

        loss, gradients = jax.value_and_grad(mean_loss)(state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state), loss

    shardings = _shardings(state_shapes(config, mesh)), NamedSharding(mesh, PartitionSpec())
    return jax.jit(update, donate_argnums=0, out_shardings=shardings)
