"""Makes hf_gpt2.npz: what Hugging Face transformers' GPT2LMHeadModel says, for tiny random models.

Run once; the tests read only the file, and neither torch nor transformers is needed for them:

    python3 -m venv golden
    golden/bin/pip install torch==2.13.0 transformers==5.24.0 numpy==2.4.6
    golden/bin/python tests/golden/make_hf_golden.py

The versions named above made the file (CPU, float32, eager attention), and it records them. Weights
come from a fixed numpy seed; every one of them is random, biases and norms too, so that leaving one
out shows. Each case moves one flag; the last moves all of them. Layout of the file:

    configs                    JSON, name of the case -> keywords of jorca's ModelConfig
    versions                   JSON, package -> version
    <case>/params/<name>       weights, float32, by jorca's names and in its layouts
    <case>/ids/<i>             token ids, int32 [T]
    <case>/logits/<i>          logits, float32 [T, V]
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

SEED = 20220711
LENGTHS = (1, 7, 24)
BASE: dict[str, Any] = {
    "vocab_size": 61,
    "n_positions": 24,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "bos_token_id": None,
    "eos_token_id": None,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "narrow_mlp": {"n_inner": 20},
    "large_epsilon": {"layer_norm_epsilon": 1e-2},
    "exact_gelu": {"activation_function": "gelu"},
    "unscaled_scores": {"scale_attn_weights": False},
    "scores_by_inverse_layer": {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "untied_head": {"tie_word_embeddings": False},
    "everything": {
        "vocab_size": 83,
        "n_embd": 20,
        "n_head": 2,
        "n_layer": 3,
        "n_inner": 28,
        "layer_norm_epsilon": 1e-3,
        "activation_function": "gelu",
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu": "gelu_erf"}

Array = np.ndarray[Any, Any]


def main() -> None:
    """Writes the file beside this script."""
    rng = np.random.default_rng(SEED)
    configs: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Any] = {}
    for name, changes in CASES.items():
        hf_config = transformers.GPT2Config(**(BASE | changes), attn_implementation="eager")
        model = transformers.GPT2LMHeadModel(hf_config).float().eval()
        randomise(model, rng)
        configs[name] = jorca_config(hf_config)
        arrays |= {f"{name}/params/{k}": v for k, v in jorca_params(hf_config, model).items()}
        for i, length in enumerate(LENGTHS):
            ids = rng.integers(0, hf_config.vocab_size, length, dtype=np.int32)
            with torch.inference_mode():
                logits = model(torch.tensor(ids[None], dtype=torch.long)).logits[0]
            arrays |= {f"{name}/ids/{i}": ids, f"{name}/logits/{i}": logits.numpy()}
    versions = {m.__name__: m.__version__ for m in (np, torch, transformers)}
    versions["python"] = platform.python_version()
    path = Path(__file__).with_name("hf_gpt2.npz")
    np.savez_compressed(path, configs=json.dumps(configs), versions=json.dumps(versions), **arrays)
    print(f"{path.name}: {len(arrays)} arrays, {path.stat().st_size:,} bytes, {versions}")


def randomise(model: Any, rng: np.random.Generator) -> None:
    """Fills every weight, so that all show: small embeddings let the norms' epsilon count."""
    for name, weight in model.named_parameters():  # a tied head comes once, as the embedding
        layer, kind = name.split(".")[-2:]
        if layer.startswith("ln_") and kind == "weight":
            value = rng.uniform(0.5, 1.5, weight.shape)
        elif layer.startswith("c_") and kind == "weight":
            value = rng.normal(0, weight.shape[0] ** -0.5, weight.shape)
        else:
            value = rng.normal(0, 0.3 if kind == "bias" else 0.1, weight.shape)
        weight.data = torch.tensor(value, dtype=torch.float32)
    model.tie_weights()


def jorca_config(config: Any) -> dict[str, Any]:
    """Returns the keywords of jorca's ModelConfig for a GPT2Config."""
    return {
        "vocab_size": config.vocab_size,
        "max_positions": config.n_positions,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "d_model": config.n_embd,
        "d_ff": config.n_inner,
        "activation": ACTIVATIONS[config.activation_function],
        "tie_embeddings": config.tie_word_embeddings,
        "norm_epsilon": config.layer_norm_epsilon,
        "scale_attention": config.scale_attn_weights,
        "scale_attention_by_inverse_layer": config.scale_attn_by_inverse_layer_idx,
    }


def jorca_params(config: Any, model: Any) -> dict[str, Array]:
    """Returns the weights by jorca's names. Conv1D kernels are [in, out] on both sides."""
    d, n = config.n_embd, config.n_head
    w = {k.removeprefix("transformer."): v.detach().numpy().copy() for k, v in model.named_parameters()}
    params = {"embed.tokens": w["wte.weight"], "embed.positions": w["wpe.weight"]}
    for i in range(config.n_layer):
        hf, at = f"h.{i}", f"layers.{i}"
        params |= {
            f"{at}.attention_norm.scale": w[f"{hf}.ln_1.weight"],
            f"{at}.attention_norm.bias": w[f"{hf}.ln_1.bias"],
            f"{at}.attention.qkv.kernel": w[f"{hf}.attn.c_attn.weight"].reshape(d, 3, n, d // n),
            f"{at}.attention.qkv.bias": w[f"{hf}.attn.c_attn.bias"].reshape(3, n, d // n),
            f"{at}.attention.out.kernel": w[f"{hf}.attn.c_proj.weight"].reshape(n, d // n, d),
            f"{at}.attention.out.bias": w[f"{hf}.attn.c_proj.bias"],
            f"{at}.mlp_norm.scale": w[f"{hf}.ln_2.weight"],
            f"{at}.mlp_norm.bias": w[f"{hf}.ln_2.bias"],
            f"{at}.mlp.up.kernel": w[f"{hf}.mlp.c_fc.weight"],
            f"{at}.mlp.up.bias": w[f"{hf}.mlp.c_fc.bias"],
            f"{at}.mlp.down.kernel": w[f"{hf}.mlp.c_proj.weight"],
            f"{at}.mlp.down.bias": w[f"{hf}.mlp.c_proj.bias"],
        }
    params |= {"final_norm.scale": w["ln_f.weight"], "final_norm.bias": w["ln_f.bias"]}
    if not config.tie_word_embeddings:
        params["head.kernel"] = w["lm_head.weight"]
    return params


if __name__ == "__main__":
    main()
