"""Frozen, keyword-only configurations, validated where they are made.

Sizes that depend on each other or on the device are resolved in one place, `jorca.engine.sizing`;
everything after it reads plain numbers. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jorca._fields import ConfigError, check_address, check_bools, check_choice, check_float, check_int

Activation = Literal["gelu_tanh", "gelu_erf"]
Dtype = Literal["float32", "bfloat16", "float16"]
Policy = Literal["orca", "request-level"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

ATTENTIONS: dict[str, str] = {
    "reference": "jorca.attention.reference:ReferenceAttention",
    "xla": "jorca.attention.xla:XlaAttention",
    "mosaic": "jorca.attention.mosaic:MosaicAttention",
    "triton": "jorca.attention.triton:TritonAttention",
}
"""Implementations of attention by name, as module:class; each is imported when somebody asks about it.

A class states what it can do (`jorca.attention.Abilities`). "auto" asks them in this order.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVSpec:
    """What attention keeps of every token position: in each layer a key and a value of each key/value head.

    Attributes:
      num_layers: Layers, L.
      num_kv_heads: Key/value heads of a layer, N_kv. As many query heads share each as there are times more.
      head_dim: Width of one head, H.
      dtype: Of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Dtype

    @property
    def bytes_per_position(self) -> int:
        """Bytes of keys and values that one token position takes, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of keys and values that a page of `page_size` positions takes, over all layers."""
        return self.bytes_per_position * page_size

    def shape(self, num_pages: int, page_size: int) -> tuple[int, int, int, int, int]:
        """Shape [L, P, N_kv, S, H] of the keys in so many pages, and of the values."""
        return self.num_layers, num_pages, self.num_kv_heads, page_size, self.head_dim

    def part(self, num_layers: int, tensor: int = 1) -> KVSpec:
        """Returns what the fullest of `tensor` devices keeps that share the heads of so many layers."""
        return dataclasses.replace(self, num_layers=num_layers, num_kv_heads=-(-self.num_kv_heads // tensor))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape and the flags of one GPT.

    Attributes:
      vocab_size: Token ids, V. Logits have so many columns.
      max_positions: Longest sequence, rows of the position table.
      num_layers: Transformer blocks, L.
      num_heads: Attention heads, N; divides `d_model`.
      d_model: Model width, D.
      d_ff: Feed-forward width, F; None becomes 4 * d_model where the config is made.
      activation: "gelu_tanh" (GPT-2, minGPT) or "gelu_erf" (current nanoGPT).
      use_bias: Whether linear layers and norms have biases. The head never has one.
      tie_embeddings: Whether the head is the token embedding.
      norm_epsilon: Added to the variance in every LayerNorm.
      scale_attention: Whether scores are divided by sqrt(head width).
      scale_attention_by_inverse_layer: Whether layer i's scores are divided by i + 1 as well.
      dtype: Weights and activations. LayerNorm, softmax and logits are float32 whatever it is.
      eos_token_id: The end-of-text token; None if the model has none.
      padded_vocab_size: Rows of the embedding and of the head, at least `vocab_size`; those behind it are
        padding, which is no token and can never be sampled. None becomes `vocab_size` where the config is
        made.
    """

    vocab_size: int
    max_positions: int
    num_layers: int
    num_heads: int
    d_model: int
    d_ff: int | None = None
    activation: Activation = "gelu_tanh"
    use_bias: bool = True
    tie_embeddings: bool = True
    norm_epsilon: float = 1e-5
    scale_attention: bool = True
    scale_attention_by_inverse_layer: bool = False
    dtype: Dtype = "float32"
    eos_token_id: int | None = None
    padded_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_positions", "num_layers", "num_heads", "d_model"):
            check_int(self, name, 1)
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"num_heads must divide d_model, got num_heads {self.num_heads} and d_model {self.d_model}"
            )
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        check_int(self, "d_ff", 1)
        if self.padded_vocab_size is None:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
        check_int(self, "padded_vocab_size", self.vocab_size)
        check_choice(self, "activation", Activation)
        check_choice(self, "dtype", Dtype)
        check_bools(self, "use_bias", "tie_embeddings", "scale_attention", "scale_attention_by_inverse_layer")
        check_float(self, "norm_epsilon", "above 0 and below 1", 0, 1)
        check_int(self, "eos_token_id", 0, optional=True)
        if self.eos_token_id is not None and self.eos_token_id >= self.vocab_size:
            raise ConfigError(
                f"eos_token_id must be below vocab_size {self.vocab_size}, got {self.eos_token_id}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head, H."""
        return self.d_model // self.num_heads

    def attention_scale(self, layer: int) -> float:
        """What the scores of layer `layer` (from 0) are multiplied by before the softmax."""
        scale = 1 / math.sqrt(self.head_dim) if self.scale_attention else 1.0
        return scale / (layer + 1) if self.scale_attention_by_inverse_layer else scale

    @property
    def kv_spec(self) -> KVSpec:
        """What attention keeps of every token position: every head has keys and values of its own."""
        return KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The preallocated KV array.

    Attributes:
      page_size: Token positions in a page, S.
      num_pages: Pages in all, P; None leaves it to `kv_memory_bytes` or to the default.
      kv_memory_bytes: Bytes for keys and values together, rounded down to whole pages. Give this or
        `num_pages`, not both. With neither, every resident request can hold a full context, within
        what the device has left (see `jorca.engine.sizing`).
    """

    page_size: int = 64
    num_pages: int | None = None
    kv_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        check_int(self, "page_size", 1)
        check_int(self, "num_pages", 1, optional=True)
        check_int(self, "kv_memory_bytes", 1, optional=True)
        if self.num_pages is not None and self.kv_memory_bytes is not None:
            raise ConfigError(
                "give num_pages or kv_memory_bytes, not both; "
                f"got {self.num_pages} and {self.kv_memory_bytes}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """When requests run.

    Attributes:
      policy: "orca", Algorithm 1 of the paper: iteration-level first come first served; or
        "request-level", the baseline that it is compared with: a batch runs to its end.
      max_batch_size: Most requests in one iteration (the paper's max_bs).
      max_batch_tokens: Most tokens in one iteration; the top of the bucket ladder. A longer prompt is
        refused. None means min(max_batch_size * max_positions, max(2048, max_positions)).
      max_in_flight: Most iterations in flight (the paper's n_workers); None means the pipeline stages.
      microbatch_size: For "request-level" alone: the batch is cut into microbatches of so many requests, at
        most `max_batch_size`, which are in flight one behind the other. None makes it a single one.
      shortest_prompt: For "request-level" alone: whether the first pass covers only as many tokens as the
        batch's shortest prompt has, and the rest of longer prompts is fed token by token.
    """

    policy: Policy = "orca"
    max_batch_size: int = 8
    max_batch_tokens: int | None = None
    max_in_flight: int | None = None
    microbatch_size: int | None = None
    shortest_prompt: bool = False

    def __post_init__(self) -> None:
        check_choice(self, "policy", Policy)
        check_int(self, "max_batch_size", 1)
        check_int(self, "max_batch_tokens", 1, optional=True)
        check_int(self, "max_in_flight", 1, optional=True)
        check_int(self, "microbatch_size", 1, optional=True)
        check_bools(self, "shortest_prompt")
        for name in ("microbatch_size", "shortest_prompt"):
            if getattr(self, name) and self.policy != "request-level":
                raise ConfigError(
                    f'{name} must be left out unless policy is "request-level", got {getattr(self, name)!r} '
                    f"with policy {self.policy!r}"
                )
        if self.microbatch_size is not None and self.microbatch_size > self.max_batch_size:
            raise ConfigError(
                f"microbatch_size must be at most max_batch_size {self.max_batch_size}, "
                f"got {self.microbatch_size}"
            )

    @property
    def policy_options(self) -> dict[str, Any]:
        """The options of the policy itself, as `jorca.scheduler.make_policy` takes them."""
        if self.policy == "orca":
            return {}
        return {"microbatch_size": self.microbatch_size, "shortest_prompt": self.shortest_prompt}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BucketConfig:
    """The ladder of batch shapes that programs are compiled for.

    Attributes:
      min_bucket: Smallest bucket, in tokens. None means 1, or what a deterministic engine needs: 64, and
        more if the model's width or vocabulary is smaller than that.
      bucket_ratio: Each bucket is at most this times the one below it (above 1). About
        (1 - 1 / ratio) / 2 of the computed rows are padding.
    """

    min_bucket: int | None = None
    bucket_ratio: float = 2.0

    def __post_init__(self) -> None:
        check_int(self, "min_bucket", 1, optional=True)
        check_float(self, "bucket_ratio", "above 1 and finite", 1, math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """How devices share the model.

    Attributes:
      stages: Pipeline stages, Q, at most the model's layers: each holds some of the layers, and as many
        iterations are in flight.
      tensor: Devices that split each layer of a stage, K; divides the heads and the feed-forward width.
    """

    stages: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "tensor"):
            check_int(self, name, 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostsConfig:
    """The processes that share the devices of a mesh, one on each host.

    Process 0 schedules, the others work for it. All are given the same model and options, and differ in
    `process_id` alone.

    Attributes:
      coordinator: HOST:PORT in process 0 where JAX's processes find each other; "auto" leaves it to JAX,
        which knows Slurm, Kubernetes and Open MPI. None means that there is only this process.
      num_processes: How many there are; None leaves it to JAX.
      process_id: Which one this is, from 0; None leaves it to JAX.
      control: HOST:PORT where process 0 listens for the others; it is bound to that address alone. None is
        the port behind the coordinator's, on the same host.
      secret_file: A file with at least 16 random bytes, the same for all processes: it encrypts the control
        messages and keeps others out.
      heartbeat_s: Seconds between signs of life; a process without any for three times as long is lost.
      start_timeout_s: Seconds that processes wait for each other when they start.
      iteration_timeout_s: Seconds that an iteration may take, once those before it are done, before it is
        taken to hang.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    control: str | None = None
    secret_file: str | None = None
    heartbeat_s: float = 5.0
    start_timeout_s: float = 300.0
    iteration_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_int(self, "num_processes", 1, optional=True)
        check_int(self, "process_id", 0, optional=True)
        check_float(self, "heartbeat_s", "above 0 and finite", 0, math.inf)
        check_float(self, "start_timeout_s", "above 0 and finite", 0, math.inf)
        check_float(self, "iteration_timeout_s", "above 0 and finite", 0, math.inf)
        if self.coordinator != "auto":
            check_address(self, "coordinator")
        check_address(self, "control")
        if self.coordinator is None:
            self._check_alone()
            return
        if not (isinstance(self.secret_file, str) and self.secret_file):
            raise ConfigError(
                f"secret_file must be a file's path where there is a coordinator, got {self.secret_file!r}; "
                "`openssl rand -hex 32` prints what to put into it"
            )
        if self.control is None and self.coordinator == "auto":
            raise ConfigError('control must be HOST:PORT of process 0 if coordinator is "auto", got None')
        if (
            self.num_processes is not None
            and self.process_id is not None
            and self.process_id >= self.num_processes
        ):
            raise ConfigError(
                f"process_id must be below num_processes {self.num_processes}, got {self.process_id}"
            )

    def _check_alone(self) -> None:
        for name in ("num_processes", "process_id", "control", "secret_file"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"coordinator must be HOST:PORT of process 0 if {name} is set, got None with {name} "
                    f"{getattr(self, name)!r}"
                )

    @property
    def control_address(self) -> str:
        """HOST:PORT where process 0 listens."""
        if self.control is not None:
            return self.control
        assert self.coordinator is not None  # asked for only where there are several processes
        host, _, port = self.coordinator.rpartition(":")
        return f"{host}:{int(port) + 1}"


_PARTS: dict[str, type] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "buckets": BucketConfig,
    "mesh": MeshConfig,
    "hosts": HostsConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything about an engine but the model.

    Attributes:
      cache: The KV array.
      scheduler: When requests run.
      buckets: Shapes that are compiled.
      mesh: Devices.
      hosts: Processes.
      attention: Which attention runs, a name of `ATTENTIONS`; "auto" takes what fits the device.
      deterministic: Whether a request's tokens and logits depend on nothing but the request, bit for bit.
        Small batches are padded, and start-up proves it (see `jorca.engine.deterministic`).
      return_logits: Whether outputs carry their logits [tokens, vocab], for study and tests.
      max_failures: Iterations in a row that may fail on the device before the engine stops; after each,
        the KV array is made anew and all requests go on by recomputation.
      seed: Where the seeds of unseeded requests come from; None takes it from the system.
      compilation_cache_dir: Folder in which compiled programs are kept for the next start (JAX's
        persistent compilation cache, a setting of the whole process); None leaves JAX as it is.
    """

    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    buckets: BucketConfig = BucketConfig()
    mesh: MeshConfig = MeshConfig()
    hosts: HostsConfig = HostsConfig()
    attention: str = "auto"
    deterministic: bool = False
    return_logits: bool = False
    max_failures: int = 3
    seed: int | None = None
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        check_choice(self, "attention", ("auto", *ATTENTIONS))
        check_bools(self, "deterministic", "return_logits")
        check_int(self, "max_failures", 0)
        check_int(self, "seed", 0, optional=True)
        folder = self.compilation_cache_dir
        if folder is not None and not (isinstance(folder, str) and folder):
            raise ConfigError(f"compilation_cache_dir must be a folder's path as a string, got {folder!r}")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Builds a config from flat keywords that carry the names of the configs' fields.

        Raises:
          TypeError: A name that no config has.
          ConfigError: A value that breaks its field's rule.
        """
        own = {f.name for f in dataclasses.fields(cls)} - set(_PARTS)
        owner = {f.name: part for part, kind in _PARTS.items() for f in dataclasses.fields(kind)}
        parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
        rest: dict[str, Any] = {}
        for name, value in options.items():
            if name in own:
                rest[name] = value
            elif name in owner:
                parts[owner[name]][name] = value
            else:
                raise TypeError(
                    f"unknown engine option {name!r}; the options are {', '.join(sorted(own | set(owner)))}"
                )
        return cls(**{part: kind(**parts[part]) for part, kind in _PARTS.items()}, **rest)
