"""Times configurations of the product kernels, for the table in muon/kernels/products.py.

    python benchmarks/tune_products.py

Prints, for each size, the TFLOP/s of every configuration that agrees with float64; symmetric products are counted as
half, so that a perfect kernel would reach the ceiling of a plain product.
"""

import torch
import triton

from muon.kernels.products import symmetric_product_kernel, update_kernel

# (BLOCK_N, BLOCK_K, num_warps, num_stages); none of these spills when compiled for sm_90.
CONFIGS = [
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 128, 8, 2),
    (128, 32, 8, 4),
    (64, 64, 4, 3),
    (64, 64, 4, 4),
    (64, 128, 4, 3),
]
SIZES = [(12, 768, 768), (12, 768, 3072), (16, 1024, 4096), (8, 2048, 2048), (8, 2048, 8192), (1, 8192, 8192)]


def milliseconds(call) -> float:
    return triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median")


def main() -> None:
    torch.manual_seed(0)
    for batch, n, m in SIZES:
        X = torch.randn(batch, n, m, device="cuda", dtype=torch.float16) / m**0.5
        A = torch.empty(batch, n, n, device="cuda", dtype=torch.float16)
        out = torch.empty_like(X)
        gram_flops, update_flops = batch * n * n * m, 2 * batch * n * n * m
        expected_gram = X[-1].double() @ X[-1].double().mT
        print(f"{batch} x {n} x {m}: torch X Xt {gram_flops / milliseconds(lambda: X @ X.mT) / 1e9:.0f}", flush=True)
        for BLOCK_N, BLOCK_K, warps, stages in CONFIGS:
            side = triton.cdiv(n, BLOCK_N)
            options = {
                "BLOCK_N": BLOCK_N,
                "BLOCK_K": BLOCK_K,
                "num_warps": warps,
                "num_stages": stages,
                "UPCAST": False,
            }

            def gram(side=side, options=options):
                symmetric_product_kernel[(side * (side + 1) // 2, batch)](
                    X, X, X, X, A, 1.0, 0.0, 0.0, n, m, HAS_C=False, HAS_D=False, EVEN_K=True, **options
                )

            def update(side=side, options=options):
                update_kernel[(side * triton.cdiv(m, options["BLOCK_N"]), batch)](
                    A, X, out, 2.0, n, m, EVEN_K=True, BLOCK_M=options["BLOCK_N"], GROUP=8, **options
                )

            gram()
            assert (A[-1].double() - expected_gram).abs().max() < 1e-2
            update()
            expected = 2 * X[-1].double() + A[-1].double() @ X[-1].double()
            assert (out[-1].double() - expected).abs().max() < 1e-2 * expected.abs().max()
            print(
                f"  {BLOCK_N:4} {BLOCK_K:4} warps {warps} stages {stages}: "
                f"X Xt {gram_flops / milliseconds(gram) / 1e9:4.0f}  aX + BX {update_flops / milliseconds(update) / 1e9:4.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
