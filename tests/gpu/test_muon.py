"""The orthogonalisation and the optimizer on a GPU, in bfloat16 and float16, at the sizes people use.

The truth here is the iteration in plain torch and float64, which a GPU does fast; that it is U p(S) Vᵀ is tested on a
CPU.
"""

import pytest
import torch
from helpers.newton_schulz import SPECTRA, error, plain_newton_schulz, spectrum

from muon import Muon, orthogonalize
from muon.kernels import hopper
from muon.polynomials import KELLER_JORDAN, schedule

FLOOR = 1e-6

# GPT-2 124M, 350M, Llama-like, attention heads, an odd shape, one past a tile's edge.
SIZES = [
    (4, 768, 768),
    (2, 768, 3072),
    (2, 3072, 768),
    (2, 1024, 4096),
    (1, 1408, 2048),
    (48, 64, 768),
    (3, 257, 1025),
    (2, 129, 65),
    (5, 1, 300),
]


def truth(G, ns_coefficients, ns_steps=5):
    return plain_newton_schulz(G.double(), schedule(ns_coefficients, ns_steps), torch.float64)


def assert_as_good_as_plain(result, G):
    """At most twice the error of plain torch in bfloat16."""
    expected = truth(G, KELLER_JORDAN)
    plain = plain_newton_schulz(G.float(), schedule(KELLER_JORDAN, 5), torch.bfloat16)
    assert error(result, expected) <= 2 * error(plain, expected) + FLOOR


def gaussian(batch, rows, cols, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, rows, cols, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("preset", ["keller_jordan", "polar_express"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.usefixtures("uninitialized_memory_is_nan")
def test_triton_is_the_polynomial_of_the_singular_values(size, dtype, preset):
    G = gaussian(*size, dtype)
    expected = truth(G, preset)
    plain = error(plain_newton_schulz(G.float(), schedule(preset, 5), dtype), expected)
    assert error(orthogonalize(G, preset, dtype=dtype, method="standard"), expected) <= 2 * plain + FLOOR


@pytest.mark.parametrize("preset", ["keller_jordan", "quintic", "polar_express", "converged"])
@pytest.mark.parametrize("kind", SPECTRA)
def test_gram_in_float16_is_no_worse_than_torch_in_bfloat16(kind, preset):
    generator = torch.Generator("cuda").manual_seed(0)
    G = spectrum(kind, 2, 768, 1536, generator, "cuda").float()
    expected = truth(G, preset)
    plain = error(plain_newton_schulz(G, schedule(preset, 5), torch.bfloat16), expected)
    assert error(orthogonalize(G, preset, method="gram"), expected) <= plain


@pytest.mark.parametrize("preset", ["keller_jordan", "quintic", "polar_express", "converged"])
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("size", [(64, 768), (768, 64), (128, 128), (100, 33), (16, 16)], ids=str)
def test_small_matrices_are_no_worse_than_torch_in_bfloat16(size, kind, preset):
    G = spectrum(kind, 64, *size, torch.Generator("cuda").manual_seed(0), "cuda").float()
    expected = truth(G, preset)
    plain = error(plain_newton_schulz(G, schedule(preset, 5), torch.bfloat16), expected)
    first = orthogonalize(G, preset)
    assert error(first, expected) <= plain
    assert all(torch.equal(orthogonalize(G, preset), first) for _ in range(5))  # threads read what others wrote


@pytest.mark.parametrize("kind", SPECTRA)
def test_the_backends_agree_on_hard_spectra(kind):
    generator = torch.Generator("cuda").manual_seed(0)
    G = spectrum(kind, 2, 512, 1024, generator, "cuda").float()
    expected = truth(G, KELLER_JORDAN)
    ours = error(orthogonalize(G, backend="triton", method="standard"), expected)
    assert ours <= 2 * error(orthogonalize(G, backend="torch", method="standard"), expected) + FLOOR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_against_torch_optim_muon(dtype):
    """Our run is no farther from the same run in float64 than twice torch's own."""
    shapes = [(768, 768), (768, 3072), (3072, 768), (768, 3072)]

    def run(build, dtype, steps=3):
        params = [(gaussian(1, *shape, seed=i)[0] / 30).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]
        start = [p.detach().double().clone() for p in params]
        optimizer = build(params)
        for step in range(steps):
            for i, p in enumerate(params):
                p.grad = gaussian(1, *p.shape, seed=100 * step + i)[0].to(dtype)
            optimizer.step()
        return [p.detach().double() - s for p, s in zip(params, start, strict=True)]

    exact = run(lambda params: Muon(params, lr=0.02), torch.float64)  # float64 takes torch's path, in float64
    ours = run(lambda params: Muon(params, lr=0.02), dtype)
    theirs = run(lambda params: torch.optim.Muon(params, lr=0.02), dtype)
    for p, q, best in zip(ours, theirs, exact, strict=True):
        assert error(p, best) <= 2 * error(q, best) + FLOOR


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 8, 8), (3, 136, 200), (40, 264, 1000), (30, 1024, 776)], ids=str)
@pytest.mark.usefixtures("uninitialized_memory_is_nan")
def test_hopper_products_are_exact_on_integers(size, dtype):
    """One tile, several of one matrix, several a program; sums of small integers are known to the bit."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(reason="kernels for Hopper alone")
    _, n, m = size
    X = torch.randint(-1, 2, size, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)
    A = X[:, :, :n] if m >= n else torch.nn.functional.pad(X, (0, n - m))
    A = A.tril() + A.tril(-1).mT
    S = A.double()
    for _ in range(3):
        assert torch.equal(hopper.symmetric_product(X, X, 1.0), (X.double() @ X.double().mT).to(dtype))
        result = hopper.symmetric_product(A, A.clone(), 0.25, (2.0, A), (-0.5, A))
        assert torch.equal(result, (0.25 * S @ S + 1.5 * S).to(dtype))
        assert torch.equal(hopper.symmetric_product(A, A, 1.0, (-3.0, A)), (S @ S - 3 * S).to(dtype))
        assert torch.equal(hopper.update(A, X, 3.5), (3.5 * X.double() + S @ X.double()).to(dtype))


@pytest.mark.parametrize("size", [(24, 768, 768), (9, 2048, 1024)], ids=str)
def test_hopper_products_are_symmetric_to_the_bit(size):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(reason="kernels for Hopper alone")
    X = gaussian(*size, torch.float16) / size[2] ** 0.5
    A = hopper.symmetric_product(X, X, 1.0)
    B = hopper.symmetric_product(A, A, 2.0, (-4.775, A))
    C = hopper.symmetric_product(A, B, 1.0, (3.4445, A), (2.0, B))
    for result in (A, B, C):
        assert torch.equal(result, result.mT)


def test_float64_is_float64():
    G = gaussian(2, 96, 160, torch.float64)
    assert error(orthogonalize(G), truth(G, KELLER_JORDAN)) < 1e-12


def test_two_groups_replay_beside_each_other():
    """Each group records its own graph; weights after many steps are those of one group a step."""

    def run(groups):
        params = [gaussian(1, 256, 128 * (1 + i), seed=i)[0].requires_grad_() for i in range(2)]
        optimizer = Muon([{"params": [p]} for p in params] if groups == 2 else params)
        for step in range(5):
            for i, p in enumerate(params):
                p.grad = gaussian(1, *p.shape, seed=100 * step + i)[0]
            optimizer.step()
        return [p.detach() for p in params]

    for a, b in zip(run(1), run(2), strict=True):
        assert torch.equal(a, b)


def test_a_callers_capture_is_refused():
    p = gaussian(1, 64, 64)[0].requires_grad_()
    p.grad = torch.randn_like(p)
    optimizer = Muon([p])
    optimizer.step()
    with pytest.raises(RuntimeError, match="can't be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_more_matrices_than_a_grid_dimension_has_programs():
    G = gaussian(70_000, 8, 8)
    result = orthogonalize(G, method="standard")
    assert_as_good_as_plain(result[-50:], G[-50:])


def test_the_optimizer_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip(reason="needs two GPUs")
    devices = ("cuda:0", "cuda:1")
    params = [gaussian(1, 256, 256)[0].to(device).requires_grad_() for device in devices]
    optimizer = Muon([{"params": [p]} for p in params])
    for step in range(4):
        for p in params:
            p.grad = gaussian(1, 256, 256, seed=step)[0].to(p.device)
        optimizer.step()
    assert torch.equal(params[0].cpu(), params[1].cpu())


def test_a_tensor_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip(reason="needs two GPUs")
    G = gaussian(2, 256, 512).to("cuda:1")
    assert_as_good_as_plain(orthogonalize(G), G)
