"""Checks that transformers itself loads what `jorca export hf` writes, and says the same.

Run from the root by hand when the export changes; tests/checkpoint/test_export.py holds the files to their
names and layouts without transformers. The first command needs jorca, the last one torch and transformers:

    .venv/bin/python -m tests.golden.check_export write exported
    python3 -m venv golden
    golden/bin/pip install torch==2.13.0 transformers==5.24.0 numpy==2.4.6
    golden/bin/python -m tests.golden.check_export check exported

The models are those of hf_gpt2.npz, whose logits transformers computed before anything was exported, and some
that GPT-2 cannot say as they are, with logits of tests/oracle/numpy_gpt.py. Weights must be all there and no
others, in the dtype they were stored in; logits agree within 1e-5 of the largest in float32, and within the
rounding of a few layers in half precision.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

BOUNDS = {"float32": 1e-5, "float16": 2**-8, "bfloat16": 2**-5}
BPE = Path(__file__).parents[1] / "data/gpt2_bpe"
TEXTS = {"Hello world": [15496, 995], "Hello, my dog is cute": [15496, 11, 616, 3290, 318, 13779]}


def write(folder: Path) -> None:
    """Saves and exports every model; expected.npz beside each holds token ids and logits."""
    from jorca.checkpoint.export import export_hf
    from jorca.checkpoint.store import save_checkpoint
    from jorca.checkpoint.tokenizer_files import tokenizer_json
    from jorca.config import ModelConfig
    from tests.oracle.golden import golden_cases
    from tests.oracle.numpy_gpt import forward, random_params

    folder.mkdir()
    cases = {case.name: case for case in golden_cases()}
    models: dict[str, Any] = {name: (case.config, case.params) for name, case in cases.items()}
    gpt2, params = models["gpt2"]
    for dtype in ("float16", "bfloat16"):
        halved = {name: x.astype(dtype) for name, x in params.items()}
        models[dtype] = dataclasses.replace(gpt2, dtype=dtype), halved
    for name, fields in {"no_biases": {"use_bias": False}, "padding": {"padded_vocab_size": 64}}.items():
        config = dataclasses.replace(gpt2, **fields)
        models[name] = config, random_params(config, seed=1)
    config = ModelConfig(
        vocab_size=50257, max_positions=24, num_layers=1, num_heads=1, d_model=2, eos_token_id=50256
    )
    models["tokenizer"] = config, random_params(config, seed=1)
    for name, (config, params) in models.items():
        tokenizer = None
        if name == "tokenizer":
            for file in ("encoder.json", "vocab.bpe"):
                (folder / file).write_bytes(gzip.decompress((BPE / f"{file}.gz").read_bytes()))
            tokenizer = tokenizer_json(folder)
        save_checkpoint(folder / f"{name}.jorca", config, params, tokenizer=tokenizer)
        export_hf(folder / f"{name}.jorca", folder / name)
        ids = np.random.default_rng(0).integers(0, config.vocab_size, 24)
        logits = forward(config, params, ids)[:, : config.vocab_size]
        if name in cases:
            ids, logits = cases[name].sequences[-1]
        np.savez(folder / name / "expected.npz", ids=ids, logits=logits)
    print(f"{folder}: {', '.join(models)}")


def check(folder: Path) -> None:
    """Loads every model with transformers; the first difference is an AssertionError."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    for path in sorted(file.parent for file in folder.glob("*/expected.npz")):
        dtype = json.loads((path / "config.json").read_text())["dtype"]
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype="auto", output_loading_info=True
        )
        assert type(model).__name__ == "GPT2LMHeadModel"
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert {str(x.dtype) for x in model.parameters()} == {f"torch.{dtype}"}
        with np.load(path / "expected.npz") as expected:
            ids, right = expected["ids"], expected["logits"]
        with torch.inference_mode():
            logits = model.eval()(torch.tensor(ids[None].astype(np.int64))).logits[0].float().numpy()
        error = np.abs(logits - right).max() / np.abs(right).max()
        assert error <= BOUNDS[dtype], f"{path.name}: {error}"
        print(f"{path.name}: {dtype}, largest difference {error:.1e} of the largest logit")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    for text, ids in TEXTS.items():
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 50256)
    print(f"tokenizer: {type(tokenizer).__name__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]))
