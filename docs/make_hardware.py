"""Makes the built-in hardware descriptions from measured kernel times: `python docs/make_hardware.py` (`--check` compares).

Reads `services/timing/hardware/sources/` (see the LICENSE.md beside them). Everything assumed rather than measured is said so
in the `source` of the number it went into.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "services/timing/hardware"
SOURCES = FOLDER / "sources"
INFERSIM = "alibaba/InferSim @ f2293dab"
TP = 2  # paper 6.1: every rollout worker uses two GPUs
ALLREDUCE_S = 15e-6
HBM_SHARE_FOR_KV = 0.85
MOE_HBM_SHARE = 0.84
MOE_MFU = 0.62
PREFILL_ATTENTION_MFU = 0.52
TARGET_A_S = 8.4e-3
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384, 32768)

PAPER_TABLE_3 = {
    "Qwen3-8B": {"prepare_s": 56.29, "finalize_s": 11.05, "activate_s": 6.26, "deactivate_s": 3.18},
    "Qwen3-30B-A3B": {"prepare_s": 67.06, "finalize_s": 17.89, "activate_s": 6.09, "deactivate_s": 4.38},
}


def rows(name: str) -> list[dict[str, str]]:
    with (SOURCES / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def gemm_table() -> dict[int, list[tuple[float, float]]]:
    """By m: (k * n, seconds), sorted. Shapes thinner than 1,000 columns are left out: no layer here is that thin."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows("infersim_h800_gemm.csv"):
        if int(row["n"]) >= 1000:
            size = float(row["k"]) * float(row["n"])
            found.setdefault(int(row["m"]), []).append((size, float(row["latency_us"]) * 1e-6))
    return {m: sorted(points) for m, points in found.items()}


def gemm_s(table: dict[int, list[tuple[float, float]]], m: int, k: float, n: float) -> float:
    """Seconds of an m x k x n product: log-log between the measured sizes k * n of the same m, in proportion beyond them."""
    points = table[max(m, 16)]
    size = k * n
    if size <= points[0][0]:
        return points[0][1] * max(size / points[0][0], 0.5)  # below a size a kernel's start dominates
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= size <= x1:
            share = math.log(size / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * math.log(y1 / y0))
    raise AssertionError("sizes are sorted")


def attention(name: str, layers: int) -> tuple[float, float, float]:
    """Floor, fixed part and slope a KV token of decode attention, all layers, TP GPUs: least squares where bandwidth rules."""
    points = [(int(r["batch_size"]) * int(r["kv_len"]), float(r["latency_us"]) * 1e-6) for r in rows(name)]
    floor = min(seconds for _, seconds in points)
    steep = [(x, y) for x, y in points if y > 2 * floor]
    # Weighted by 1 / x^2: relative errors count alike over three decades.
    weights = [1 / x**2 for x, _ in steep]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, steep, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, steep, strict=True)) / total
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, steep, strict=True)) / sum(
        w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, steep, strict=True)
    )
    fixed = max(0.0, mean_y - slope * mean_x)
    return layers * floor, layers * fixed, layers * slope / TP


def describe(name: str, key: str, attention_file: str, host_s: float, host_source: str) -> dict[str, Any]:
    """One description; its `host_s` and that number's source are given."""
    constants = json.loads((SOURCES / "constants.json").read_text(encoding="utf-8"))
    model, gpu = constants["models"][key], constants["gpus"]["H800-SXM"]
    layers, hidden, heads, kv_heads, head_dim = (
        model[field] for field in ("layers", "hidden", "q_heads", "kv_heads", "head_dim")
    )
    hbm, peak = gpu["hbm_tb_s"] * 1e12, gpu["bf16_dense_tflops"] * 1e12
    nvlink = gpu["nvlink_gb_s_effective_unidirectional"] * 1e9
    infiniband = gpu["ib_gb_s_effective"] * 1e9 * TP
    table = gemm_table()

    def experts_s(m: int) -> float:
        """Routed experts of one layer: reading those that some token chose, or computing, whichever takes longer."""
        count, chosen, size = model["experts"], model["experts_per_token"], model["expert_params"]
        read = count * (1 - (1 - chosen / count) ** m) * size * 2 / TP / (MOE_HBM_SHARE * hbm)
        compute = 2 * m * chosen * size / TP / (MOE_MFU * peak)
        return max(read, compute)

    def layer_s(m: int) -> float:
        seconds = gemm_s(table, m, hidden, (heads + 2 * kv_heads) * head_dim / TP)
        seconds += gemm_s(table, m, heads * head_dim / TP, hidden)
        if "experts" in model:
            seconds += experts_s(m)
        else:
            seconds += gemm_s(table, m, hidden, 2 * model["intermediate"] / TP)
            seconds += gemm_s(table, m, model["intermediate"] / TP, hidden)
        return seconds + 2 * (ALLREDUCE_S + m * hidden * 2 / nvlink)

    linear = [max(layers * layer_s(other) for other in TOKENS if other <= m) for m in TOKENS]  # measured noise levelled
    head_rows = [m for m in TOKENS if m <= 1024]
    head = [gemm_s(table, m, hidden, model["vocab"] / TP) for m in head_rows]
    floor, fixed, slope = attention(attention_file, layers)
    pair = layers * 4 * heads * head_dim / TP / (PREFILL_ATTENTION_MFU * peak)
    weights = float(model["weights_bf16_bytes"])
    kv_bytes = float(model["kv_bytes_per_token_bf16"])
    capacity = int((TP * gpu["hbm_gb"] * 1e9 * HBM_SHARE_FOR_KV - weights) / kv_bytes)

    def sourced(value: float, source: str) -> dict[str, Any]:
        return {"value": float(f"{value:.6g}"), "source": source}

    description: dict[str, Any] = {
        "name": name,
        "text": f"{key} in bfloat16 on {TP} H800 (tensor parallel), as in the paper's 6.1",
        "gpus": TP,
        "layers": layers,
        "max_context_tokens": model["max_position"],
        "weights_bytes": weights,
        "kv_bytes_per_token": kv_bytes,
        "kv_capacity_tokens": capacity,
        "linear": {
            "tokens": list(TOKENS),
            "seconds": [float(f"{value:.5g}") for value in linear],
            "source": (
                f"{INFERSIM} kernel times measured on an H800, between the measured sizes log-log; plus two all-reduces a "
                f"layer over NVLink at {nvlink / 1e9:.0f} GB/s and, assumed, {ALLREDUCE_S * 1e6:.0f} us each"
            ),
        },
        "head": {
            "tokens": head_rows,
            "seconds": [float(f"{value:.5g}") for value in head],
            "source": f"{INFERSIM} GEMM times measured on an H800, for the vocabulary of {model['vocab']}",
        },
        "host_s": sourced(host_s, host_source),
        "attention_floor_s": sourced(floor, f"{INFERSIM} decode attention measured on an H800: the least of all"),
        "attention_fixed_s": sourced(fixed, f"{INFERSIM} decode attention, fitted where bandwidth rules"),
        "attention_s_per_token": sourced(slope, f"the same fit; heads halved by tensor parallelism of {TP}"),
        "prefill_attention_s_per_pair": sourced(
            pair,
            f"4 x heads x head_dim FLOP at {PREFILL_ATTENTION_MFU} of {peak / 1e12:.0f} TFLOPS: the share that {INFERSIM} "
            "measured at 1,024 tokens on an H20; longer ones reach more there, assumed not to on an H800 with six times its FLOPS",
        ),
        "transfer_bytes_per_s": sourced(
            infiniband, f"{gpu['ib_gb_s_effective']} GB/s effective a GPU (InferSim hardware/gpu.py), {TP} GPUs"
        ),
        "transfer_fixed_s": sourced(0.002, "assumed: bootstrap and registration of one hand-over"),
        "load_bytes_per_s": sourced(infiniband, "weights travel over the same network; our assumption"),
        **{field: sourced(value, "PEARL paper, Table 3") for field, value in PAPER_TABLE_3[key].items()},
        "set_role_s": sourced(
            10.0, "assumed: the paper's 4.3.2 says 'tens of seconds' at most for rebinding, routers and graph capture"
        ),
        "train_s": sourced(163.8, "PEARL paper, 3.1 (which model is not said)"),
        "train_batch": 64,
        "train_gpus": 8,
    }
    if "experts" in model:
        description["linear"]["source"] += (
            f"; routed experts: {MOE_HBM_SHARE} of HBM bandwidth (256 experts read in 2.67 ms) or {MOE_MFU} of peak "
            "(large batches), both from the measured grouped GEMM in FP8"
        )
    return description


def descriptions() -> dict[str, str]:
    """Every file by its name."""
    source = (
        f"calibrated: makes A of eq. 1 {TARGET_A_S * 1e3:.1f} ms, with which the closed forms choose what the paper's 6.5.1 "
        "reports for Qwen3-8B (one of many such sets)"
    )
    dense = ("h800-qwen3-8b", "Qwen3-8B", "infersim_h800_mha_decode_32-8-128.csv")
    bare = describe(*dense, 0.0, source)
    rest_s = bare["linear"]["seconds"][0] + bare["head"]["seconds"][0] + bare["attention_floor_s"]["value"]
    host_s = TARGET_A_S - rest_s
    moe = ("h800-qwen3-30b-a3b", "Qwen3-30B-A3B", "infersim_h800_mha_decode_32-4-128.csv")
    made = (describe(*dense, host_s, source), describe(*moe, host_s, "as for h800-qwen3-8b: the same engine around it"))
    return {f"{each['name']}.json": json.dumps(each, indent=1) + "\n" for each in made}


def main(arguments: list[str]) -> int:
    """Write the files; with --check, only compare."""
    made = descriptions()
    if arguments != ["--check"]:
        for name, text in made.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return 0
    stale = [name for name, text in made.items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    for name in stale:
        print(f"{name} is out of date: run python docs/make_hardware.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
