"""What the scan's kernels take of a multiprocessor, found without a GPU: compile and disassemble.

`python tests/compile_kernels.py bfloat16 float32 --publish` prints a line for each kernel on sm_80
and sm_90, within a minute, and writes results/chunk_scan/triton_aot.json. Bare it prints bfloat16;
p=NN, n=NN, h=NN ask for other sizes.
"""
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import chunk_scan_triton  # noqa: E402
import common  # noqa: E402

VARIANTS = (("decay_fwd", {}, 3), ("state_scan", {"BWD": False}, 3), ("mix", {"BWD": False}, 3),
            ("state_scan", {"BWD": True}, 3), ("mix", {"BWD": True}, 3),
            ("bc_bwd", {"IS_C": True}, 2), ("bc_bwd", {"IS_C": False}, 2), ("decay_bwd", {}, 3))
# Arguments that end in _b, _l, _d are strides; every other is a pointer, to x's dtype or to these.
FLOAT32 = {"dt", "A", "D", "dt_rows", "sums", "passing", "over", "leaving", "direct", "ddt", "dA",
           "dD"}


def compile_kernel(name, variant, stages, capability, x, B):
    """Compile one kernel for x (b l h p) and B (b l 2 g n) -> what it takes of a multiprocessor."""
    from triton.backends.compiler import GPUTarget
    triton, kernel = chunk_scan_triton.triton, getattr(chunk_scan_triton, name)
    values = {"A_MIN": chunk_scan_triton.A_MIN, "PARTS": 1, **variant,
              **chunk_scan_triton.constants(x, B)}
    names, low = kernel.arg_names, "*bf16" if x.dtype == torch.bfloat16 else "*fp32"
    values, warps = {k: v for k, v in values.items() if k in names}, values["num_warps"]
    signature = {n: "constexpr" if n in values else "*fp32" if n in FLOAT32 else
                 "i32" if re.fullmatch(r"L|batch|\w+_[bld]", n) else low for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if n not in values and n not in ("L", "batch")}  # as a launch finds them
    compiled = triton.compile(
        triton.compiler.ASTSource(kernel, signature, values, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages})
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage, sass = (subprocess.run([tools / tool, flag, file.name], text=True, check=True,
                                      capture_output=True).stdout
                       for tool, flag in (("cuobjdump", "--dump-resource-usage"),
                                          ("nvdisasm", "--print-code")))
    spills, mma, wgmma = (len(re.findall(rf"\b({op})\b", sass))
                          for op in ("STL|LDL", "HMMA", "HGMMA"))
    transposed = re.search(r"tt\.trans [^:]*: tensor<[^>]*, #mma\d*>", compiled.asm["ttgir"])
    return {"kernel": name, **variant, "sm": capability, "dtype": str(x.dtype).split(".")[1],
            "registers": int(re.search(r"REG:(\d+)", usage)[1]), "spills": spills,
            "shared_kb": round(compiled.metadata.shared / 1024, 1), "mma": mma, "wgmma": wgmma,
            "transposed_product": bool(transposed)}


def main(publish, dtypes, h=24, p=64, n=64):
    """Every kernel at the released sizes, or at others."""
    triton = chunk_scan_triton.triton
    if triton is None:
        sys.exit("triton is not installed; pip install triton (on Linux)")
    warnings.simplefilter("ignore")  # of triton, about its own next release
    rows = []
    for dtype in dtypes:
        x, B = torch.empty(1, 1, h, p, dtype=dtype), torch.empty(1, 1, 2, 1, n, dtype=dtype)
        for variant in VARIANTS:
            for capability in (80, 90):
                rows.append(compile_kernel(*variant, capability, x, B))
                print(json.dumps(rows[-1]), flush=True)
    if publish:
        common.publish("chunk_scan", "triton_aot", {"triton": triton.__version__, "h": h, "p": p,
                                                    "n": n, "kernels": rows})


if __name__ == "__main__":
    words = sys.argv[1:]
    main("--publish" in words,
         [getattr(torch, w) for w in words if w in ("bfloat16", "float32")] or [torch.bfloat16],
         **{w[0]: int(w[2:]) for w in words if re.fullmatch(r"[hpn]=\d+", w)})
