"""What docs/migrating.md says of other implementations: steps written from their formulas give our weights."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.pages import ROOT, run

from muon import PRESETS, Muon

PAGE = {}
run(ROOT / "docs" / "migrating.md", PAGE)

SHAPES = [(8, 8), (24, 8), (8, 24)]
LR, DECAY, MU = 0.03, 0.2, 0.9
POLAR_EXPRESS = (  # microsoft/dion dion/polar_express.py, as it is written there
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonal(M, steps=PRESETS["keller_jordan"], margin=1.0):
    X = M / (M.norm() * margin)
    for a, b, c in steps:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


def original(rows, cols):
    return math.sqrt(max(1, rows / cols))


def match_rms(rows, cols):
    return 0.2 * math.sqrt(max(rows, cols))


def spectral(rows, cols):
    return math.sqrt(rows / cols)


def lerp_momentum(B, G, nesterov):
    """torch and Keller Jordan: (buffer, what is orthogonalised)."""
    B = MU * B + (1 - MU) * G
    return B, MU * B + (1 - MU) * G if nesterov else B


def sum_momentum(B, G, nesterov):
    """dion and Moonlight."""
    B = MU * B + G
    return B, MU * B + G if nesterov else B


def theirs(W, grads, momentum, nesterov, f, steps=PRESETS["keller_jordan"], margin=1.0):
    """Weights and momentum buffer after one step for each gradient."""
    B = torch.zeros_like(W)
    for G in grads:
        B, M = momentum(B, G, nesterov)
        W = (1 - LR * DECAY) * W - LR * f(*W.shape) * orthogonal(M, steps, margin)
    return W, B


def ours(W, grads, **options):
    """The weights after one step for each gradient, and the optimizer."""
    p = torch.nn.Parameter(W.clone())
    optimizer = Muon([p], **({"lr": LR, "weight_decay": DECAY, "momentum": MU} | options))
    for G in grads:
        p.grad = G.clone()
        optimizer.step()
    return p, optimizer


def problem(shape, steps=3, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape).double(), list(torch.randn(steps, *shape).double())


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("momentum", "nesterov", "f", "steps", "margin", "options"),
    [
        (lerp_momentum, True, original, PRESETS["keller_jordan"], 1.0, {}),  # Keller Jordan, torch
        (lerp_momentum, False, original, PRESETS["keller_jordan"], 1.0, {"nesterov": False}),
        (sum_momentum, True, match_rms, PRESETS["keller_jordan"], 1.0, {"adjust_lr_fn": "match_rms_adamw"}),
        (
            sum_momentum, False, spectral, POLAR_EXPRESS, 1.02,  # dion's defaults
            {"nesterov": False, "adjust_lr_fn": "spectral_unclamped", "ns_coefficients": "polar_express"},
        ),
        (
            sum_momentum, True, lambda rows, cols: 1.0, PRESETS["quintic"], 1.0,  # dion: adjust_lr=None
            {"adjust_lr_fn": lambda shape: 1.0, "ns_coefficients": "quintic"},
        ),
    ],
    ids=["keller_jordan", "torch_without_nesterov", "moonlight", "dion", "dion_unadjusted"],
)  # fmt: skip
def test_their_steps_are_ours(shape, momentum, nesterov, f, steps, margin, options):
    W, grads = problem(shape)
    assert_same(theirs(W, grads, momentum, nesterov, f, steps, margin)[0], ours(W, grads, **options)[0].detach())


@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072), (5, 7)])
@pytest.mark.parametrize("name", ["original", "match_rms_adamw", "spectral_unclamped"])
def test_the_factors_of_the_page_are_the_optimizers(name, shape):
    small = tuple(-(-side // 16) for side in shape)
    updates = [
        ours(torch.zeros(small).double(), problem(small, steps=1)[1], adjust_lr_fn=f)[0].detach()
        for f in (name, lambda shape: 1.0)
    ]
    assert_same(updates[0], updates[1] * PAGE["factors"][name](*small))


def test_torchs_factors_are_the_pages():
    from torch.optim._muon import _adjust_lr

    for name in ("original", "match_rms_adamw"):
        for shape in SHAPES:
            assert _adjust_lr(1.0, name, torch.Size(shape)) == pytest.approx(PAGE["factors"][name](*shape))


def test_a_convolution_of_keller_jordan_has_the_factor_of_its_kernel():
    W, grads = problem((32, 2, 3, 3))
    flat = theirs(W.flatten(1), [G.flatten(1) for G in grads], lerp_momentum, True, lambda rows, cols: 1.0)[0]
    assert_same(flat.view(W.shape), ours(W, grads, adjust_lr_fn=lambda shape: 1.0)[0].detach())
    by_matrix = theirs(W.flatten(1), [G.flatten(1) for G in grads], lerp_momentum, True, original)[0]
    assert_same(by_matrix.view(W.shape), ours(W, grads)[0].detach())  # 32 × 18, so the two differ


@pytest.mark.parametrize("split", [3, (8, 12, 4)])
def test_blocks_of_rows_are_matrices_with_factors_of_their_own(split):
    W, grads = problem((24, 10))
    sizes = (8, 8, 8) if split == 3 else split
    blocks = zip(W.split(sizes), *(G.split(sizes) for G in grads), strict=True)
    separate = [theirs(block, some, sum_momentum, True, spectral)[0] for block, *some in blocks]
    assert_same(torch.cat(separate), ours(W, grads, split=split, adjust_lr_fn="spectral_unclamped")[0].detach())


def adam(W, grads, lr, betas, eps, decay):
    """Keller Jordan's adam_update and its caller; also the moments."""
    m, v = torch.zeros_like(W), torch.zeros_like(W)
    for step, G in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * G
        v = betas[1] * v + (1 - betas[1]) * G.square()
        update = m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
        W = (1 - lr * decay) * W - lr * update
    return W, m, v


def test_keller_jordans_adam_is_our_adamw_group():
    W, grads = problem((6, 5))
    p = torch.nn.Parameter(W.clone())
    group = {"params": [p], "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "adamw_eps": 1e-10}
    optimizer = Muon([group | {"weight_decay": 0.1}])
    for G in grads:
        p.grad = G
        optimizer.step()
    assert_same(adam(W, grads, 3e-4, (0.9, 0.95), 1e-10, 0.1)[0], p.detach())


def test_match_rms_adamw_moves_elements_by_a_fifth_of_the_learning_rate():
    W, grads = problem((40, 60), steps=1)
    p, _ = ours(W, grads, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_coefficients="converged")
    assert (p - W).square().mean().sqrt().item() == pytest.approx(0.2 * LR, rel=1e-2)


@pytest.mark.parametrize(
    ("momentum", "arguments", "names"),
    [
        (lerp_momentum, {}, ("momentum_buffer", "exp_avg", "exp_avg_sq")),
        (sum_momentum, {"momentum": "momentum", "exp_avg": "momentum", "exp_avg_sq": "variance", "scale": 1 - MU},
         ("momentum", "momentum", "variance")),
    ],
    ids=["keller_jordan", "dion"],
)  # fmt: skip
def test_a_converted_checkpoint_trains_on(momentum, arguments, names):
    (W, grads), (V, vector_grads) = problem((8, 12), steps=4), problem((7,), steps=4, seed=1)
    W3, B3 = theirs(W, grads[:3], momentum, True, original)
    V3, m3, v3 = adam(V, vector_grads[:3], LR, (0.9, 0.95), 1e-10, DECAY)
    matrix, vector = torch.nn.Parameter(W3), torch.nn.Parameter(V3)
    old = SimpleNamespace(
        state={matrix: {names[0]: B3}, vector: {names[1]: m3, names[2]: v3}},
        param_groups=[{"params": [matrix]}, {"params": [vector], "step": 3}],
    )
    groups = [
        {"params": [matrix]},
        {"params": [vector], "algorithm": "adamw", "betas": (0.9, 0.95), "adamw_eps": 1e-10},
    ]
    new = Muon(groups, lr=LR, weight_decay=DECAY, momentum=MU)
    PAGE["copy_state"](old, new, **arguments)
    matrix.grad, vector.grad = grads[3], vector_grads[3]
    new.step()
    assert_same(matrix.detach(), theirs(W, grads, momentum, True, original)[0])
    assert_same(vector.detach(), adam(V, vector_grads, LR, (0.9, 0.95), 1e-10, DECAY)[0])
    assert new.state_dict()["state"][0]["momentum_buffer"].shape == (8, 12)
