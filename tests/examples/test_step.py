"""One step: its gradient whatever the micro-batch, clipping, float16 with its scaler, and who gets which decay."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from examples.gpt.presets import MODELS, PRESETS, Preset
from examples.gpt.step import make_optimizer, make_scheduler, model_shape, train_step, validate

SMALL = {"layers": 1, "heads": 2, "width": 16, "context": 8, "vocab_size": 32, "compile": False, "dtype": "float32"}


def small(name: str, **options: object) -> Preset:
    return dataclasses.replace(PRESETS[name], **(SMALL | options))


def make_model(preset: Preset) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[preset.architecture](**model_shape(preset, "flash"))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def random_batch(sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(32, (2, sequences, 8), generator=generator)
    return inputs, targets


def sgd_step(model: nn.Module, sequences: int = 6, **options: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss, and by how much every parameter moved: SGD's learning rate is 1."""
    model = copy.deepcopy(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loss = train_step(model, optimizer, scheduler, random_batch(sequences), options.pop("dtype", "float32"), **options)
    return loss, [old - new for old, new in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 5, 100])
def test_micro_batches_change_rounding_alone(micro_batch: int) -> None:
    """Also where the last one is smaller."""
    model = make_model(small("cpu"))
    loss, moved = sgd_step(model)
    other_loss, other_moved = sgd_step(model, micro_batch=micro_batch)
    torch.testing.assert_close(other_loss, loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(moved, other_moved, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_gradient_is_clipped_to_its_largest_norm() -> None:
    model = make_model(small("cpu"))
    (_, free), (_, clipped), (_, loose) = sgd_step(model), sgd_step(model, clip=0.01), sgd_step(model, clip=1e9)
    assert nn.utils.get_total_norm(free) > 0.1
    assert nn.utils.get_total_norm(clipped).item() == pytest.approx(0.01, rel=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(free, loose, strict=True))


def test_float16_scales_and_clips_what_it_unscaled() -> None:
    model = make_model(small("cpu"))
    _, expected = sgd_step(model, clip=0.1)
    _, moved = sgd_step(model, clip=0.1, dtype="float16", scaler=GradScaler("cpu"), micro_batch=2)
    distance = nn.utils.get_total_norm([a - b for a, b in zip(moved, expected, strict=True)])
    assert distance < 0.01 * nn.utils.get_total_norm(expected)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_gradient_that_overflows_float16_is_skipped(optimizer: str) -> None:
    preset = small("cpu")
    model = make_model(preset)
    before = copy.deepcopy(model.state_dict())
    made = make_optimizer(model, preset, optimizer)
    scaler = GradScaler("cpu", init_scale=2.0**40)
    train_step(model, made, make_scheduler(made, preset), random_batch(4), "float16", clip=1.0, scaler=scaler)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert scaler.get_scale() == 2.0**39


def test_shakespeare_char_decays_what_nanogpt_decays() -> None:
    """Every matrix, embeddings among them; no norm. One learning rate, and beta2 of 0.99."""
    preset = small("shakespeare-char")
    model = make_model(preset)
    optimizer = make_optimizer(model, preset, "adamw")
    for group in optimizer.param_groups:
        assert group["lr"] == 1e-3 and tuple(group["betas"]) == (0.9, 0.99) and group["eps"] == 1e-8
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.dim() == 2 else 0.0)


@pytest.mark.parametrize("name", ["cpu", "shakespeare-char"])
def test_both_optimizers_treat_the_rest_alike(name: str) -> None:
    preset = small(name)
    model = make_model(preset)
    rest = {}
    for optimizer in ("muon", "adamw"):
        groups = make_optimizer(model, preset, optimizer).param_groups
        hidden = preset.muon_lr if optimizer == "muon" else preset.adamw_lr
        matrices = {id(p) for block in model.blocks for p in block.parameters() if p.dim() == 2}
        rest[optimizer] = {
            id(p): (group["lr"], group["weight_decay"], tuple(group["betas"]))
            for group in groups
            for p in group["params"]
            if id(p) not in matrices
        }
        assert all(group["lr"] == hidden for group in groups for p in group["params"] if id(p) in matrices)
    assert rest["muon"] == rest["adamw"] and len(rest["muon"]) >= 3


def test_validation_is_without_dropout_and_training_goes_on_with_it() -> None:
    preset = small("shakespeare-char", eval_batches=2, batch=2)
    model = make_model(preset)
    tokens = torch.randint(32, (100,), generator=torch.Generator().manual_seed(0)).numpy()
    losses = [validate(model, tokens, preset, torch.device("cpu")) for _ in range(2)]
    assert losses[0] == losses[1]
    assert model.training
