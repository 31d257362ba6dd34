"""The architectures and sizes that train.py knows by name."""

from __future__ import annotations

from dataclasses import dataclass

from examples.gpt.model import GPT
from examples.gpt.nanogpt import NanoGPT

MODELS = {"gpt": GPT, "nanogpt": NanoGPT}


@dataclass(frozen=True)
class Preset:
    architecture: str  # of MODELS
    layers: int
    heads: int
    width: int
    vocab_size: int  # at least; the tokenizer's if that is larger
    context: int  # tokens in a sequence
    batch: int  # sequences that one process handles at once
    steps: int
    warmup: int  # steps of linear warm-up
    schedule: str  # "wsd": 1, then linearly to 0 over the last `decay` steps; "cosine": along a cosine to `final`
    muon_lr: float  # of the hidden matrices under Muon ...
    adamw_lr: float  # ... and under AdamW
    embedding_lr: float  # of everything else, AdamW under both
    weight_decay: float  # of the hidden matrices
    dtype: str  # of the forward and backward pass; the weights stay float32
    compile: bool
    log_every: int  # steps
    eval_every: int  # steps, a multiple of log_every
    eval_batches: int
    decay: int = 0  # steps
    final: float = 0.0  # share of the learning rate
    batch_tokens: int | None = None  # in a step, over all processes; None: `batch` sequences
    dropout: float = 0.0
    embedding_decay: float = 0.0  # weight decay of the embeddings
    beta2: float = 0.95  # AdamW's
    clip: float = 0.0  # the gradient's largest norm; 0: any
    qk_clip: float | None = None  # the attention logits' threshold
    checkpoint_every: int | None = None  # steps; None: eval_every
    tokenizer: str | None = None  # None: what the data comes in, bytes for text

    @property
    def sequences(self) -> int:
        """In a step, over all processes."""
        return self.batch if self.batch_tokens is None else self.batch_tokens // self.context


PRESETS = {
    "cpu": Preset(  # two minutes on two cores
        architecture="gpt", layers=4, heads=4, width=128, vocab_size=256,
        context=128, batch=16, steps=700, warmup=20, schedule="wsd", decay=350,
        muon_lr=0.02, adamw_lr=4e-3, embedding_lr=1e-2, weight_decay=0.1,
        dtype="float32", compile=False,
        log_every=10, eval_every=100, eval_batches=16,
    ),
    # nanoGPT's baby GPT: https://github.com/karpathy/nanoGPT/blob/master/config/train_shakespeare_char.py
    "shakespeare-char": Preset(
        architecture="nanogpt", layers=6, heads=6, width=384, dropout=0.2, vocab_size=0, tokenizer="chars",
        context=256, batch=64, steps=5000, warmup=100, schedule="cosine", final=0.1,
        muon_lr=0.02, adamw_lr=1e-3, embedding_lr=1e-3, weight_decay=0.1, embedding_decay=0.1, beta2=0.99, clip=1.0,
        dtype="bfloat16", compile=True,
        log_every=10, eval_every=250, eval_batches=200,
    ),
    "gpt2-124m": Preset(  # GPT-2 small's shape; needs a GPU
        architecture="gpt", layers=12, heads=12, width=768, vocab_size=50304,
        context=1024, batch=32, steps=5000, warmup=100, schedule="wsd", decay=2000,
        muon_lr=0.02, adamw_lr=1e-3, embedding_lr=1e-3, weight_decay=0.1,
        dtype="bfloat16", compile=True,
        log_every=10, eval_every=250, eval_batches=20,
    ),
    "gpt2-350m": Preset(  # GPT-2 medium's
        architecture="gpt", layers=24, heads=16, width=1024, vocab_size=50304,
        context=1024, batch=16, batch_tokens=131_072, steps=5000, warmup=100, schedule="wsd", decay=2000,
        muon_lr=0.02, adamw_lr=6e-4, embedding_lr=6e-4, weight_decay=0.1,
        dtype="bfloat16", compile=True,
        log_every=10, eval_every=250, eval_batches=40,
    ),
}  # fmt: skip
