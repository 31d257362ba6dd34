"""The sizes that train.py knows by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    layers: int
    heads: int
    width: int
    vocab_size: int
    context: int  # tokens in a sequence
    batch: int  # sequences in a step
    steps: int
    warmup: int  # steps of linear warm-up
    decay: int  # last steps, over which the learning rate falls linearly to 0
    muon_lr: float  # of the hidden matrices under Muon ...
    adamw_lr: float  # ... and under AdamW
    embedding_lr: float  # of everything else, AdamW under both
    weight_decay: float  # of the hidden matrices
    dtype: str  # of the forward and backward pass; the weights stay float32
    compile: bool
    log_every: int  # steps
    eval_every: int  # steps, a multiple of log_every
    eval_batches: int


PRESETS = {
    "cpu": Preset(  # two minutes on two cores
        layers=4, heads=4, width=128, vocab_size=256,
        context=128, batch=16, steps=700, warmup=20, decay=350,
        muon_lr=0.02, adamw_lr=4e-3, embedding_lr=1e-2, weight_decay=0.1,
        dtype="float32", compile=False,
        log_every=10, eval_every=100, eval_batches=16,
    ),
    "gpt2-124m": Preset(  # GPT-2 small's shape; needs a GPU
        layers=12, heads=12, width=768, vocab_size=50304,
        context=1024, batch=32, steps=5000, warmup=100, decay=2000,
        muon_lr=0.02, adamw_lr=1e-3, embedding_lr=1e-3, weight_decay=0.1,
        dtype="bfloat16", compile=True,
        log_every=10, eval_every=250, eval_batches=20,
    ),
}  # fmt: skip
