"""Compiles every kernel configuration for Hopper, which needs no GPU, and reads what the assembler says about it."""

import os
import subprocess
import sys

import pytest

# Runs in a process of its own, because here Triton may be set to interpret its kernels.
SCRIPT = """
import re, subprocess, tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attention.kernels import backward, forward
from attention.kernels.tiles import HOPPER_16BIT, ANY_32BIT

FP32 = ("lse_ptr", "delta_ptr", "dlse_ptr")
KERNELS = (forward._forward_kernel, backward._grad_q_kernel, backward._grad_kv_kernel)

# Both accumulators of 256 columns fit with Triton 3.6, just; 3.9 wants some registers more.
SPILLS = {(backward._grad_kv_kernel, 256): 400}


def ptx(kernel, tile, head_dim, pointer, causal):
    constants = dict(
        D=head_dim, DV=head_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=head_dim, BLOCK_DV=head_dim,
        BOUND_RIGHT=causal, UPCAST=False, stride_qd=1, stride_kd=1, stride_vd=1, stride_dod=1, dlse_ptr=None,
    )
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        aligned = name.endswith("_ptr") or name.startswith("stride_")
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in FP32 else pointer
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if aligned and name not in constants:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 * 1024, f"{compiled.metadata.shared} bytes of shared memory"
    return compiled.asm["ptx"]


def spilled(text):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(count) for count in re.findall(r"(\\d+) bytes spill", report))


# In fp32 the widths people use: the table's wider ones spill a little, being there to be right, not fast.
cases = [("*bf16", width, tiles, (True, False)) for width, tiles in HOPPER_16BIT.items()]
cases += [("*fp32", width, ANY_32BIT[width], (True,)) for width in (32, 64)]
for pointer, head_dim, tiles, masks in cases:
    for kernel, tile in zip(KERNELS, tiles, strict=True):
        for causal in masks:
            what = f"{kernel.__name__} {pointer} {head_dim} {tile} causal={causal}"
            try:
                text = ptx(kernel, tile, head_dim, pointer, causal)
                spill = spilled(text)
                assert spill <= SPILLS.get((kernel, head_dim), 0), f"spills {spill} bytes"
                assert pointer == "*fp32" or "wgmma.mma_async" in text, "does not use wgmma"
            except Exception as error:
                print(f"{what}: {error}")
            else:
                print(f"{what}: ok")
"""


def test_every_configuration_compiles_without_spills():
    pytest.importorskip("triton", reason="needs Triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) > 0
    assert [line for line in lines if not line.endswith(": ok")] == []
