import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from examples.gpt.generate import generate, sample
from examples.gpt.model import GPT, Attention
from examples.gpt.nanogpt import NanoGPT
from examples.gpt.presets import MODELS, PRESETS
from examples.gpt.step import model_shape
from muon import QKClip

SHAPE = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab_size": 64}


BOTH = pytest.mark.parametrize("architecture", list(MODELS))


def make_model(attention: str = "flash", architecture: str = "gpt", std: float = 0.2, **options: Any) -> nn.Module:
    """Random everywhere: as initialised, the blocks add nothing."""
    torch.manual_seed(0)
    model = MODELS[architecture](**SHAPE, attention=attention, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(0))


@BOTH
@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_a_later_token_leaves_earlier_logits(attention: str, architecture: str) -> None:
    model, tokens = make_model(attention, architecture), random_tokens(2, 16)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-5)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-3


@BOTH
def test_both_attentions_are_the_same_function(architecture: str) -> None:
    flash, sdpa = make_model("flash", architecture), make_model("sdpa", architecture)
    sdpa.load_state_dict(flash.state_dict())
    tokens = random_tokens(2, 16)
    torch.testing.assert_close(flash(tokens), sdpa(tokens), rtol=1e-4, atol=1e-4)


@BOTH
def test_the_loss_is_the_cross_entropy_of_the_logits(architecture: str) -> None:
    model, tokens, targets = make_model("flash", architecture), random_tokens(2, 16), random_tokens(2, 16).flip(1)
    log_p = model(tokens).double().log_softmax(-1)
    expected = -log_p.gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets).double(), expected, rtol=1e-5, atol=1e-6)


@BOTH
def test_a_new_model_finds_every_token_about_equally_likely(architecture: str) -> None:
    model = MODELS[architecture](**SHAPE)
    loss = model(random_tokens(2, 16), random_tokens(2, 16).flip(1))
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), abs=0.05)


def test_a_new_block_is_the_identity() -> None:
    model = GPT(**SHAPE)
    x = torch.randn(2, 16, 32)
    assert all(torch.equal(block(x), x) for block in model.blocks)


@pytest.mark.parametrize(
    ("name", "size"),
    [("gpt2-124m", 124e6), ("gpt2-350m", 354e6), ("shakespeare-char", 10.65e6 + 256 * 384)],  # 10.65 as nanoGPT counts
)
def test_presets_have_their_size(name: str, size: float) -> None:
    preset = dataclasses.replace(PRESETS[name], vocab_size=PRESETS[name].vocab_size or 65)
    with torch.device("meta"):
        model = MODELS[preset.architecture](**model_shape(preset, "flash"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.005)


def nanogpt_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """nanoGPT's forward pass written out in float64: LayerNorm, softmax, exact GELU, learned positions, tied head."""
    p = {name: parameter.detach().double() for name, parameter in model.named_parameters()}

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    length, heads = tokens.size(1), SHAPE["heads"]
    x = p["embedding.weight"][tokens] + p["position_embedding.weight"][:length]
    hidden = torch.ones(length, length).triu(1).bool()
    for i in range(SHAPE["layers"]):
        block = f"blocks.{i}."
        qkv = norm(x, p[block + "norm_1.weight"]) @ p[block + "attention.qkv.weight"].T
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(hidden, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ p[block + "attention.out.weight"].T
        up = norm(x, p[block + "norm_2.weight"]) @ p[block + "up.weight"].T
        x = x + up * 0.5 * (1 + torch.erf(up / math.sqrt(2))) @ p[block + "down.weight"].T
    return norm(x, p["norm.weight"]) @ p["embedding.weight"].T


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_nanogpt_is_nanogpt(attention: str) -> None:
    model, tokens = make_model(attention, "nanogpt", dropout=0.2).eval(), random_tokens(2, 16)
    truth = nanogpt_logits(model, tokens)
    assert (model(tokens).double() - truth).abs().max() < 1e-5 * truth.abs().max()


def test_nanogpt_starts_as_nanogpt_does() -> None:
    torch.manual_seed(0)
    model = NanoGPT(layers=2, heads=2, width=128, context=64, vocab_size=64)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        into_the_stream = name.endswith(("out.weight", "down.weight"))
        assert parameter.std().item() == pytest.approx(0.01 if into_the_stream else 0.02, rel=0.03), name


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_dropout_is_in_all_of_nanogpts_places(attention: str) -> None:
    """Of the embedding, of the attention's weights, and of what either half of a block adds; in training alone."""
    model, tokens = make_model(attention, "nanogpt", dropout=0.5), random_tokens(2, 16)
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 1 + SHAPE["layers"]
    for module in model.modules():  # the attention's alone
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    first, second, kept = model(tokens), model(tokens), model.eval()(tokens)
    assert not torch.equal(first, second) and torch.equal(kept, model(tokens))
    for layer in (module for module in model.modules() if isinstance(module, Attention)):
        layer.dropout = 0.0
    torch.testing.assert_close(model.train()(tokens), kept)


@pytest.mark.parametrize(
    ("attention", "bf16", "architecture"),
    [("flash", False, "gpt"), ("flash", True, "gpt"), ("sdpa", True, "gpt"), ("flash", True, "nanogpt")],
)
def test_compiles_into_one_graph(attention: str, bf16: bool, architecture: str) -> None:
    model, tokens = make_model(attention, architecture), random_tokens(2, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        expected, got = model(tokens, tokens), compiled(tokens, tokens)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    got_grads = torch.autograd.grad(got, list(model.parameters()))
    torch.testing.assert_close(got, expected)
    for grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-4)


def recomputed(model: nn.Module, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """What greedy generation gives without a cache, prompt included."""
    for _ in range(length):
        with torch.no_grad():
            logits = model(tokens[:, -model.context :])
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


@BOTH
@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("prompt", [1, 10, 16, 20])
def test_greedy_generation_equals_recomputation(attention: str, prompt: int, architecture: str) -> None:
    """Within the context (16) and beyond it, where it slides."""
    model, tokens = make_model(attention, architecture), random_tokens(8, prompt)
    for parameter in model.blocks.parameters():
        torch.nn.init.normal_(parameter)  # large, or the likeliest token is always the one before
    expected = recomputed(model, tokens, 24)
    assert len(expected[:, prompt:].unique()) > 10
    assert torch.equal(torch.cat([tokens, *generate(model, tokens, 24, temperature=0)], 1), expected)


def test_generation_reads_each_token_once_until_the_context_is_full() -> None:
    model, read = make_model(), []
    model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    assert len(list(generate(model, random_tokens(1, 10), 9))) == 9
    assert read == [10, 1, 1, 1, 1, 1, 1, 16, 16]


@BOTH
def test_qk_clip_takes_the_place_of_qk_norm(architecture: str) -> None:
    model = MODELS[architecture](**SHAPE, qk_clip=True)
    QKClip(model, torch.optim.SGD(model.parameters()))
    assert not any(name.endswith(("q_norm.weight", "k_norm.weight")) for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match="QK-clip needs attention='flash'"):
        MODELS[architecture](**SHAPE, attention="sdpa", qk_clip=True)


def test_logits_for_qk_clip_come_from_training_alone() -> None:
    model = make_model(qk_clip=True)
    layer = model.blocks[0].attention
    model.eval()(random_tokens(2, 16))
    assert layer.max_logits.isneginf().all()
    model.train()(random_tokens(2, 16))
    assert layer.max_logits.isfinite().all()


def test_sampling_follows_temperature_and_top_k() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k, top_p in [
        (1.0, None, 1.0),
        (0.5, None, 1.0),
        (1.0, 2, 1.0),
        (1.0, 99, 1.0),
        (1.0, None, 0.8),
    ]:
        drawn = sample(logits, temperature, top_k, top_p, generator)
        frequency = torch.bincount(drawn.flatten(), minlength=4) / len(logits)
        expected = (logits[0] / temperature).softmax(-1)
        if top_k == 2 or top_p == 0.8:  # the two likeliest have 0.88 together, the likeliest 0.64
            expected = torch.tensor([-torch.inf, -torch.inf, 2.0, 3.0]).softmax(-1)
        torch.testing.assert_close(frequency, expected, rtol=0, atol=0.015)


@pytest.mark.parametrize("top_k", [None, 3])
def test_sampling_at_the_ends_of_the_temperature(top_k: int | None) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(200, 1)
    generator = torch.Generator().manual_seed(0)
    assert sample(logits, 1e-300, top_k, 1.0, generator).unique().tolist() == [3]
    assert sample(logits, 1e300, top_k, 1.0, generator).unique().tolist() == [0, 1, 2, 3][-(top_k or 4) :]


def test_nucleus() -> None:
    """The fewest likeliest tokens that reach the share; equally likely ones at its border stay together."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(500, 1)
    generator = torch.Generator().manual_seed(0)
    for top_p, kept in [(1e-9, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (1.0, 4)]:
        assert sample(logits, 1.0, None, top_p, generator).unique().tolist() == list(range(kept))
    assert sample(logits, 1.0, 2, 0.9, generator).unique().tolist() == [0, 1]
    assert sample(logits, 1.0, 2, 0.6, generator).unique().tolist() == [0]  # of the two, 2/3
