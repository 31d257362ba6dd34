from pathlib import Path

import pytest
import torch

from examples.gpt import checkpoint
from examples.gpt.cli import UserError
from examples.gpt.model import GPT, sample
from examples.gpt.presets import PRESETS
from examples.train import model_shape
from muon import QKClip

SHAPE = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab_size": 64}


def make_model(attention: str = "flash") -> GPT:
    """Random everywhere: as initialised, the blocks add nothing."""
    torch.manual_seed(0)
    model = GPT(**SHAPE, attention=attention)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_a_later_token_leaves_earlier_logits(attention: str) -> None:
    model, tokens = make_model(attention), random_tokens(2, 16)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-5)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-3


def test_both_attentions_are_the_same_function() -> None:
    flash, sdpa = make_model("flash"), make_model("sdpa")
    sdpa.load_state_dict(flash.state_dict())
    tokens = random_tokens(2, 16)
    torch.testing.assert_close(flash(tokens), sdpa(tokens), rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, tokens, targets = make_model(), random_tokens(2, 16), random_tokens(2, 16).flip(1)
    log_p = model(tokens).double().log_softmax(-1)
    expected = -log_p.gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_new_model_finds_every_token_about_equally_likely() -> None:
    model = GPT(**SHAPE)
    loss = model(random_tokens(2, 16), random_tokens(2, 16).flip(1))
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), abs=0.05)


def test_a_new_block_is_the_identity() -> None:
    model = GPT(**SHAPE)
    x = torch.randn(2, 16, 32)
    assert all(torch.equal(block(x), x) for block in model.blocks)


def test_gpt2_124m_has_124_million_parameters() -> None:
    with torch.device("meta"):
        model = GPT(**model_shape(PRESETS["gpt2-124m"], "flash"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124e6, rel=0.01)


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("bf16", [False, True])
def test_compiles_into_one_graph(attention: str, bf16: bool) -> None:
    model, tokens = make_model(attention), random_tokens(2, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        expected, got = model(tokens, tokens), compiled(tokens, tokens)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    got_grads = torch.autograd.grad(got, list(model.parameters()))
    torch.testing.assert_close(got, expected)
    for grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-4)


def recomputed(model: GPT, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """What greedy generation gives without a cache, prompt included."""
    for _ in range(length):
        with torch.no_grad():
            logits = model(tokens[:, -model.context :])
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("prompt", [1, 10, 16, 20])
def test_greedy_generation_equals_recomputation(attention: str, prompt: int) -> None:
    """Within the context (16) and beyond it, where it slides."""
    model, tokens = make_model(attention), random_tokens(8, prompt)
    for parameter in model.blocks.parameters():
        torch.nn.init.normal_(parameter)  # large, or the likeliest token is always the one before
    expected = recomputed(model, tokens, 24)
    assert len(expected[:, prompt:].unique()) > 10
    assert torch.equal(torch.cat([tokens, *model.generate(tokens, 24, temperature=0)], 1), expected)


def test_generation_reads_each_token_once_until_the_context_is_full() -> None:
    model, read = make_model(), []
    model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    assert len(list(model.generate(random_tokens(1, 10), 9))) == 9
    assert read == [10, 1, 1, 1, 1, 1, 1, 16, 16]


def test_qk_clip_takes_the_place_of_qk_norm() -> None:
    model = GPT(**SHAPE, qk_clip=True)
    QKClip(model, torch.optim.SGD(model.parameters()))
    assert not any(name.endswith("norm.weight") for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match="QK-clip needs attention='flash'"):
        GPT(**SHAPE, attention="sdpa", qk_clip=True)


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


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    model, tokens = make_model(), random_tokens(2, 16)
    checkpoint.save(tmp_path / "model.pt", model, SHAPE | {"attention": "flash"}, step=3)
    again = checkpoint.load(tmp_path / "model.pt", torch.device("cpu"))
    assert torch.equal(model(tokens), again(tokens))
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
    assert torch.load(tmp_path / "model.pt", weights_only=True)["step"] == 3


def test_a_truncated_or_foreign_checkpoint_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    checkpoint.save(path, make_model(), SHAPE | {"attention": "flash"}, step=3)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a model"):
        checkpoint.load(path, torch.device("cpu"))
    torch.save({"weights": torch.zeros(3)}, path)
    with pytest.raises(UserError, match="not a model"):
        checkpoint.load(path, torch.device("cpu"))
