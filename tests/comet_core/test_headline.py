"""README's short tables choose what they say they choose."""

from typing import Any

from comet_core import headline


def score(recipe: str, value: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "eval", "model": "m", "task": "wikitext2", "windows": 40, "seq_len": 2048, "recipe": recipe,
        "metric": "perplexity", "value": value, "kv_quantized": recipe != "fp16", "protocol": {},
    } | more  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_accuracy_takes_the_longest_and_latest_and_the_best_of_the_others() -> None:
    records = [
        score("fp16", 10.0), score("w4a4kv4", 13.0), score("w4a4kv4", 12.0), score("w4a4kv4", 5.0, windows=8),
        score("w4a4kv4", 6.0, kv_quantized=False), score("w4a4kv4", 7.0, protocol={"engine": "vLLM 0.26.0"}),
        score("w4a4kv4", 8.0, task="c4"), score("w4a4kv4", 0.1, metric="kl"),
        score("atom", 15.0), score("quarot", 14.0), score("quarot", 1.0, kv_quantized=False), score("qoq-g128", 11.0),
        score("w4a4kv4+fast", 2.0),
    ]  # fmt: skip
    assert cells(headline.accuracy(records)) == [["m", "10.00", "", "12.00", "14.00 (quarot)", "11.00"]]
    whole = [score("fp16", 9.0, windows="all"), score("w4a4kv4", 9.5, windows="all")]
    assert cells(headline.accuracy([*records, *whole])) == [["m", "9.00", "", "9.50", "", ""]]


def gemm(m: int, n: int, speedup: float, quantized: bool, path: str = headline.INTEGER, **more: Any) -> dict[str, Any]:
    return {
        "kind": "bench", "op": "w4ax_gemm", "path": path, "m": m, "n": n, "k": 128, "speedup": speedup,
        "includes_quantize": quantized, "ablation": None, "provenance": {"git": "a", "command": "own"},
    } | more  # fmt: skip


def test_gemm_is_a_geometric_mean_of_the_default_kernels_own_runs() -> None:
    beside = {"provenance": {"git": "a", "command": "with peers"}}
    records = [
        gemm(1, 1, 3.0, False), gemm(1, 1, 4.0, False), gemm(1, 2, 1.0, False), gemm(16, 1, 9.0, False),
        gemm(1, 1, 1.5, True), gemm(1, 2, 6.0, True), gemm(1, 1, 50.0, False, ablation="pipeline"),
        gemm(1, 1, 60.0, False, "w4ax_gemm_sm90"),
        gemm(1, 1, 70.0, False, **beside), gemm(1, 1, 80.0, False, "vllm_marlin", **beside),
    ]  # fmt: skip
    assert cells(headline.gemm(records)) == [["GEMM alone", "2.00", "9.00"], ["with quantize_act", "3.00", ""]]


def served(scheme: str, rate: float, engine: str = "comet", batch: int = 256, **more: Any) -> dict[str, Any]:
    return {
        "kind": "e2e", "model": headline.SERVED, "layers": 32, "scheme": scheme, "engine": engine, "batch": batch,
        "prompt_tokens": 1024, "output_tokens": 512, "tokens_per_s": rate,
        "tpot_ms": 1000 / rate, "memory_gib": rate / 10,
    } | more  # fmt: skip


def test_served_names_the_best_that_is_not_ours() -> None:
    records = [
        served("16-bit", 100.0), served("W4A4KV4", 150.0), served("W8A8", 120.0), served("W4A8KV4", 160.0),
        served("KV4", 999.0), served("W4A4KV4", 5000.0, output_tokens=128), served("W4A4KV4", 900.0, model="other"),
        served("bf16", 80.0, "vLLM 0.26.0"), served("comet+ownkv4", 120.0, "vLLM 0.26.0"),
        served("fp8", 110.0, "vLLM 0.26.0"), served("comet-free+ownkv4", 130.0, "vLLM 0.26.0"),
        served("fp8", 400.0, "vLLM 0.26.0, GPUs: 2 (tensor parallel)"),
    ]  # fmt: skip
    *_, ours, vllm = cells(headline.served(records))
    assert ours == ["COMET, 256 at once", "100", "150", "1.50", "160 (W4A8KV4)", "10.0 to 6.7", "10.0 to 15.0"]
    assert vllm == ["vLLM, 256 at once", "80", "120", "1.50", "110 (fp8)", "12.5 to 8.3", ""]
