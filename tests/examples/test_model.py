from pathlib import Path

import pytest
import torch

from examples.gpt import checkpoint
from examples.gpt.cli import UserError
from examples.gpt.model import GPT, sample
from examples.gpt.presets import PRESETS
from examples.train import model_shape

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


def test_greedy_generation_takes_the_likeliest_and_slides_its_window() -> None:
    model, tokens = make_model(), random_tokens(1, 10)
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for token in model.generate(tokens, 12, temperature=0):
        assert torch.equal(seen[-1], tokens[:, -16:])
        with torch.no_grad():
            expected = model(tokens[:, -16:])[:, -1].argmax(-1, keepdim=True)
        assert torch.equal(token, expected)
        tokens = torch.cat([tokens, token], dim=1)
    assert tokens.shape == (1, 22)


def test_sampling_follows_temperature_and_top_k() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in [(1.0, None), (0.5, None), (1.0, 2), (1.0, 99)]:
        drawn = sample(logits, temperature, top_k, generator)
        frequency = torch.bincount(drawn.flatten(), minlength=4) / len(logits)
        expected = (logits[0] / temperature).softmax(-1)
        if top_k == 2:
            expected = torch.tensor([-torch.inf, -torch.inf, 2.0, 3.0]).softmax(-1)
        torch.testing.assert_close(frequency, expected, rtol=0, atol=0.015)


@pytest.mark.parametrize("top_k", [None, 3])
def test_sampling_at_the_ends_of_the_temperature(top_k: int | None) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(200, 1)
    generator = torch.Generator().manual_seed(0)
    assert sample(logits, 1e-300, top_k, generator).unique().tolist() == [3]
    assert sample(logits, 1e300, top_k, generator).unique().tolist() == [0, 1, 2, 3][-(top_k or 4) :]


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
