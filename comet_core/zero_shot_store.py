"""What decides a log-likelihood, and where it is kept: Contestant -> Store, a file per task in the cache folder.

A contestant is a model that may be scored, known before its weights are read. Everything but the request that decides
its scores (content digest, recipe, reading of the KV cache, type, device, the code that computes) names the folder;
the task and its documents' hash name the file. So no limit or order of tasks makes a result wrong, and a run that
breaks goes on.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from comet_core import kv_cache, kv_open_page, linear
from comet_core.model_source import resolve_model
from comet_core.packed import is_packed, read_manifest
from comet_core.recipe import KVCacheSpec
from comet_core.zero_shot_tasks import LoadedTask
from comet_cuda import affine, kv4_append, quantize_act, w4ax_gemm
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

SCORING_FILES = (kv_cache, kv_open_page, linear, affine, kv4_append, quantize_act, w4ax_gemm)


@dataclass(frozen=True)
class Contestant:
    """A model that may be scored: what it is, known before its weights are read.

    Attributes:
        digest: of everything stored in it. base: the 16-bit model that it was packed from.
        open_page: "16bit" (the rule) or "4bit" (its own page is read in 4 bit as well).
    """

    spec: str
    name: str
    recipe: str
    recipe_digest: str | None
    digest: str
    note: str
    kv_cache: KVCacheSpec
    int4_mac_fraction: float
    calibration: str
    base: str | None
    open_page: str
    device: str
    dtype: torch.dtype

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything but the request that decides a log-likelihood."""
        code = hashlib.sha256(b"".join(Path(str(module.__file__)).read_bytes() for module in SCORING_FILES))
        kind = self.device.partition(":")[0]
        return {
            "model": self.digest,
            "recipe": self.recipe_digest,
            "open_page": self.open_page,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": kind,
            "gpu": torch.cuda.get_device_name(self.device) if kind == "cuda" else None,
            "code": code.hexdigest()[:16],
        }


def describe(spec: str, open_page: str, device: str, dtype: torch.dtype) -> Contestant:
    """A packed folder, or anything that names a 16-bit model.

    Errors:
        CometError if there is no such model, or it has no text to be asked about (random weights).
    """
    if is_packed(Path(spec)) or (Path(spec) / "packing.json").is_file():
        manifest = read_manifest(Path(spec))
        content = json.dumps([manifest.sha256, manifest.recipe_digest], sort_keys=True).encode()
        recipe = manifest.recipe
        return Contestant(
            spec=spec,
            name=manifest.model["name"],
            recipe=recipe.name,
            recipe_digest=manifest.recipe_digest,
            digest=hashlib.sha256(content).hexdigest()[:16],
            note=manifest.model["note"],
            kv_cache=recipe.kv_cache,
            int4_mac_fraction=manifest.int4_mac_fraction,
            calibration="{name} ({origin}), {samples} x {seq_len} tokens, seed {seed}".format(**manifest.data),
            base=manifest.model["spec"],
            open_page=open_page if recipe.kv_cache.bits == 4 else "16bit",
            device=device,
            dtype=dtype,
        )
    source = resolve_model(spec)
    if source.folder is None:
        raise CometError(f"{source.name}: random weights have no tokenizer and answer nothing", "give a real model")
    kv = KVCacheSpec(bits=16)
    return Contestant(
        spec, source.name, "fp16", None, source.digest(), source.note, kv, 0.0, "none", None, "16bit", device, dtype
    )


class Store:
    """Log-likelihoods of one contestant on one task: request -> (log-likelihood, whether it is the greedy answer).

    A file of JSON lines in the cache folder, only ever added to; a line that a kill cut short is scored again.
    """

    def __init__(self, who: Contestant, task: LoadedTask) -> None:
        key = hashlib.sha256(json.dumps(who.identity, sort_keys=True).encode()).hexdigest()[:24]
        self.path = cache_dir() / "zero_shot" / key / f"{task.name}-{task.sha256[:16]}.jsonl"
        self.found: dict[str, tuple[float, bool]] = {}
        self._identity = who.identity | {"name": who.name, "task": task.name}
        lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
                self.found[row["request"]] = (float(row["log_likelihood"]), bool(row["greedy"]))
            except (ValueError, KeyError, TypeError):
                continue  # the identity, or cut short

    def add(self, rows: dict[str, tuple[float, bool]]) -> None:
        """Keep and write results."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [] if self.path.exists() else [json.dumps(self._identity)]
        lines += [json.dumps({"request": key, "log_likelihood": ll, "greedy": g}) for key, (ll, g) in rows.items()]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.found |= rows


def request_key(arguments: tuple[str, str]) -> str:
    """A request's name in the store: hash of context and continuation."""
    return hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()[:24]
