"""Compiles a kernel for Hopper, which needs no GPU, and reads what the assembler says about it.

For scripts that run in a process of their own: where tests run, Triton may be set to interpret its kernels.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HELPERS = Path(__file__).parent.parent
ROOT = HELPERS.parent
OLDEST_TRITON = ROOT / ".venv" / "triton-oldest"  # where `make test` has put the first that the package supports


class Report(NamedTuple):
    ptx: str
    spilled_bytes: int
    warnings: list[str]
    cubin: bytes


def compile_kernel(kernel, signature, constants, aligned, **options) -> Report:
    """`signature` types the run-time arguments, `aligned` names those that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = signature | dict.fromkeys(constants, "constexpr")
    places = [(i,) for i, name in enumerate(kernel.arg_names) if name in aligned]
    # A pointer that comes with its strides in a tuple is aligned too, as all of torch's memory.
    tuples = [i for i, name in enumerate(kernel.arg_names) if isinstance(signature[name], tuple)]
    places += [(i, 0) for i in tuples if signature[kernel.arg_names[i]][0].startswith("*")]
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 * 1024, f"{compiled.metadata.shared} bytes of shared memory"
    ptx = compiled.asm["ptx"]
    report = _assemble(ptx)
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", report))
    return Report(ptx, spilled, re.findall(r"C75\d\d.*", report), compiled.asm["cubin"])


def _assemble(ptx: str) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def waits_first(ptx: str) -> bool:
    """Whether a kernel waits for the one before it ahead of anything in memory."""
    return re.search(r"griddepcontrol\.wait|\b(ld|st|atom|red)\.(\w+\.)*global|cp\.async", ptx)[0].startswith("grid")


def loops_with_products(cubin: bytes) -> list[list[str]]:
    """The machine instructions of each innermost loop with wgmma.

    A loop is a conditional branch backwards. Code that hardly ever runs, such as a barrier's second try, lies behind
    all the rest and comes back without a condition.
    """
    instructions, labels = _disassemble(cubin)
    spans = []
    for end, instruction in enumerate(instructions):
        branch = re.match(r"@\S+ BRA.*?(\.L_x_\d+)", instruction)
        start = labels[branch[1]] if branch else end
        if any("HGMMA" in one for one in instructions[start:end]):
            spans.append((start, end))
    innermost = [a for a in spans if not any(a[0] <= b[0] and b[1] <= a[1] for b in spans if b != a)]
    return [instructions[start:end] for start, end in innermost]


def _disassemble(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """The instructions, and in front of which of them each label stands."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(get_ptxas(90).path).with_name("nvdisasm"), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            instructions.append(instruction[1])
    return instructions, labels


def run_uninterpreted(script: str, packages: Path | None = None) -> list[str]:
    """The lines that a Python script prints, run without Triton's interpreter and with these packages before others."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*([packages] if packages else []), ROOT, HELPERS]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
