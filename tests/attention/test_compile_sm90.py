"""Compiles every kernel configuration for Hopper, which needs no GPU, and reads what the assembler says about it."""

import pytest
from helpers.sm90 import run_uninterpreted

SCRIPT = """
from helpers.sm90 import compile_kernel

from attention.kernels import backward, forward, mask_gradient
from attention.kernels.tiles import ANY_32BIT, HOPPER_16BIT, padded_widths

KERNELS = (forward._forward_kernel, backward._grad_q_kernel, backward._grad_kv_kernel)
FP32 = {"lse_ptr", "delta_ptr", "dlse_ptr", "max_logits_ptr", "sinks_ptr", "slopes_ptr", "dmask_ptr"}
FLOATS = {"scale", "softcap", "keep_scale"}
OPTIONAL = {
    "dlse_ptr", "max_logits_ptr", "sinks_ptr", "slopes_ptr", "mask", "seed_ptr", "cu_q_ptr", "cu_k_ptr",
    "softcap", "drop_below", "keep_scale",
}
VARLEN = {"cu_q_ptr", "cu_k_ptr"}
DROPOUT = {"seed_ptr", "drop_below", "keep_scale"}
# What is on, whether a window's right and left are.
OPTION_CASES = [
    (VARLEN | {"softcap", "sinks_ptr"}, True, True),
    (DROPOUT | {"slopes_ptr"}, True, False),
    ({"mask"}, False, False),
]


def compile_tile(kernel, tile, dtype, width, width_v, right, left=False, on=frozenset(), more=None):
    block_d, block_dv = padded_widths(width, width_v)
    constants = dict(
        D=width, DV=width_v, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=block_d, BLOCK_DV=block_dv,
        BOUND_LEFT=left, BOUND_RIGHT=right, ONE_LOOP=(left or right) and tile.one_loop, UPCAST=False, **(more or {}),
    )
    constants |= dict.fromkeys(OPTIONAL - on)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    queries, keys = tile.block_m, tile.block_n
    shapes = {"q_desc": (queries, block_d), "k_desc": (keys, block_d), "v_desc": (keys, block_dv)}
    shapes |= dict.fromkeys(("out_desc", "do_desc"), (queries, block_dv))
    signature = {}
    for name in kernel.arg_names:
        if name.endswith("_desc") and dtype == "fp32":
            signature[name] = ("*fp32", "i32", "i32", "i32")
        elif name.endswith("_desc"):
            signature[name] = f"tensordesc<{dtype}[1, 1, {shapes[name][0]}, {shapes[name][1]}]>"
        elif name.endswith("_rows"):
            signature[name] = (f"*{dtype}", "i32", "i32", "i32")
        elif name == "mask":
            signature[name] = (f"*{dtype}", "i32", "i32", "i32", "i32")
        elif name.endswith("_ptr"):
            integers = {"seed_ptr": "*i64", "cu_q_ptr": "*i32", "cu_k_ptr": "*i32"}
            signature[name] = integers.get(name, "*fp32" if name in FP32 else f"*{dtype}")
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in constants]
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    return compile_kernel(kernel, signature, constants, pointers, **options)
"""

PLAIN = """
# Bytes. What a causal mask adds at 128 and 256 columns lies in the loop for NaN and inf, which hardly ever runs; with
# Triton 3.9 some more.
ALLOWED = {
    ("bf16", 128, backward._grad_kv_kernel): 64, ("bf16", 256, backward._grad_q_kernel): 512,
    ("bf16", 192, backward._grad_kv_kernel): 64, ("bf16", 256, backward._grad_kv_kernel): 1024,
    ("fp32", 64, forward._forward_kernel): 64,
}
# In fp32 the widths people use: the table's wider ones spill a little, being there to be right, not fast.
cases = [("bf16", width, width, HOPPER_16BIT[width], (True, False)) for width in (64, 128)]
cases += [("bf16", width, width, HOPPER_16BIT[width], (True,)) for width in (32, 256)]
cases += [("bf16", 192, 128, HOPPER_16BIT[256], (True,)), ("bf16", 40, 24, HOPPER_16BIT[64], (True,))]
cases += [("fp32", width, width, ANY_32BIT[width], (True,)) for width in (32, 64)]
for dtype, width, width_v, tiles, masks in cases:
    for kernel, tile in zip(KERNELS, tiles, strict=True):
        for causal in masks:
            report = compile_tile(kernel, tile, dtype, width, width_v, causal)
            expected = ["cp.async.bulk.tensor", "wgmma.mma_async"] if dtype != "fp32" else []
            faults = [instruction for instruction in expected if instruction not in report.ptx]
            if report.spilled_bytes > ALLOWED.get((dtype, max(width, width_v), kernel), 0):
                faults.append(f"spills {report.spilled_bytes} bytes")
            print(f"{kernel.__name__} {dtype} {width} {width_v} {tile} causal={causal}:", faults or "ok")
"""

# A kilobyte goes into the loop for NaN and inf; more would say that something is badly compiled.
OPTIONS = """
for on, right, left in OPTION_CASES:
    for kernel, tile in zip(KERNELS, HOPPER_16BIT[128], strict=True):
        report = compile_tile(kernel, tile, "bf16", 128, 128, right, left, on)
        faults = [f"spills {report.spilled_bytes} bytes"] if report.spilled_bytes > 1024 else []
        print(f"{kernel.__name__} {sorted(on)}:", faults or "ok")
tile = HOPPER_16BIT[128].backward_q._replace(num_stages=1)
once = {"ONE_ROW": False, "ONE_COLUMN": False, "EXP2": True}
report = compile_tile(mask_gradient._grad_mask_kernel, tile, "bf16", 128, 128, False, on={"mask"}, more=once)
print("mask gradient:", f"spills {report.spilled_bytes} bytes" if report.spilled_bytes else "ok")
"""

# An atomic operation would wait until all that the program wrote has arrived: up to 7 % of a forward.
MAX_LOGITS = """
import re

for width in (64, 128):
    tile = HOPPER_16BIT[width].forward
    report = compile_tile(forward._forward_kernel, tile, "bf16", width, width, True, on={"max_logits_ptr"})
    faults = re.findall(r"\\b(?:atom|red|membar)\\.\\S*", report.ptx)
    faults += [f"spills {report.spilled_bytes} bytes"] * (report.spilled_bytes > 0)
    print(f"max_logits {width}:", faults or "ok")
"""


@pytest.mark.parametrize(("cases", "count"), [(PLAIN, 30), (OPTIONS, 10), (MAX_LOGITS, 2)])
def test_every_configuration_compiles(cases, count):
    pytest.importorskip("triton", reason="needs Triton, which is for Linux only")
    lines = run_uninterpreted(SCRIPT + cases)
    assert len(lines) == count
    assert [line for line in lines if not line.endswith(": ok")] == []
