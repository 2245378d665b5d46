"""A GPT over one sequence, written from its definition in numpy float64.

No batch, no cache, no JAX and none of jorca's arithmetic: only its names and layouts of weights.
Radford et al., Language Models are Unsupervised Multitask Learners, 2019; Vaswani et al., Attention
Is All You Need, 2017; Ba et al., Layer Normalization, 2016; Hendrycks and Gimpel, Gaussian Error
Linear Units, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jorca.config import ModelConfig
from jorca.model.params import param_table

Array = np.ndarray[Any, Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def forward(config: ModelConfig, params: Mapping[str, Array], token_ids: Sequence[int] | Array) -> Array:
    """Returns the logits, float64 [T, V], that follow each of the T tokens of one sequence."""
    w = {name: np.asarray(weight).astype(np.float64) for name, weight in params.items()}
    tokens = np.asarray(token_ids)
    x_td = w["embed.tokens"][tokens] + w["embed.positions"][: len(tokens)]
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        x_td = x_td + _attention(config, w, layer, _norm(config, w, f"{at}.attention_norm", x_td))
        x_td = x_td + _mlp(config, w, f"{at}.mlp", _norm(config, w, f"{at}.mlp_norm", x_td))
    x_td = _norm(config, w, "final_norm", x_td)
    head_vd = w["embed.tokens"] if config.tie_embeddings else w["head.kernel"]
    return x_td @ head_vd.T


def _norm(config: ModelConfig, w: Mapping[str, Array], name: str, x_td: Array) -> Array:
    mean = x_td.mean(axis=-1, keepdims=True)
    variance = ((x_td - mean) ** 2).mean(axis=-1, keepdims=True)
    y_td = (x_td - mean) / np.sqrt(variance + config.norm_epsilon) * w[f"{name}.scale"]
    return y_td + w[f"{name}.bias"] if config.use_bias else y_td


def _attention(config: ModelConfig, w: Mapping[str, Array], layer: int, x_td: Array) -> Array:
    name = f"layers.{layer}.attention"
    num_tokens, head_dim = len(x_td), config.d_model // config.num_heads
    o_td = np.zeros_like(x_td)
    for head in range(config.num_heads):
        q_th, k_th, v_th = (x_td @ w[f"{name}.qkv.kernel"][:, i, head] for i in range(3))
        if config.use_bias:
            q_th, k_th, v_th = (y + w[f"{name}.qkv.bias"][i, head] for i, y in enumerate((q_th, k_th, v_th)))
        scores = q_th @ k_th.T
        if config.scale_attention:
            scores = scores / math.sqrt(head_dim)
        if config.scale_attention_by_inverse_layer:
            scores = scores / (layer + 1)
        for t in range(num_tokens):  # a token sees itself and what came before it
            seen = np.exp(scores[t, : t + 1] - scores[t, : t + 1].max())
            o_td[t] += (seen / seen.sum()) @ v_th[: t + 1] @ w[f"{name}.out.kernel"][head]
    return o_td + w[f"{name}.out.bias"] if config.use_bias else o_td


def _mlp(config: ModelConfig, w: Mapping[str, Array], name: str, x_td: Array) -> Array:
    h_tf = x_td @ w[f"{name}.up.kernel"]
    if config.use_bias:
        h_tf = h_tf + w[f"{name}.up.bias"]
    y_td = _gelu(config, h_tf) @ w[f"{name}.down.kernel"]
    return y_td + w[f"{name}.down.bias"] if config.use_bias else y_td


def _gelu(config: ModelConfig, x: Array) -> Array:
    if config.activation == "gelu_erf":
        return x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def random_params(config: ModelConfig, seed: int) -> dict[str, Array]:
    """Returns float32 weights under which every flag of the config shows in the logits.

    A fresh model's weights would hide mistakes: biases are zero, norms are one, scores are flat. Here
    biases and norm scales are random, and a kernel keeps the size of what it multiplies. The
    embeddings are small, so that the norms' epsilon counts.
    """
    rng = np.random.default_rng(seed)
    params: dict[str, Array] = {}
    for name, info in param_table(config).items():
        match name.rpartition(".")[2]:
            case "scale":
                weight = rng.uniform(0.5, 1.5, info.shape)
            case "kernel":
                weight = rng.normal(0, _num_inputs(name, info.shape) ** -0.5, info.shape)
            case _:
                weight = rng.normal(0, 0.1 if name.startswith("embed.") else 0.3, info.shape)
        params[name] = weight.astype(np.float32)
    return params


def _num_inputs(name: str, shape: tuple[int, ...]) -> int:
    """Returns how many numbers one output of a kernel sums over."""
    if name.endswith("attention.out.kernel"):  # [N, H, D]
        return shape[0] * shape[1]
    return shape[1] if name == "head.kernel" else shape[0]  # [V, D], else [in, ...]
