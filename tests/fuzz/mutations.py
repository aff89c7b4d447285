"""Random damage to files: bytes changed, cut, repeated, spliced; values of JSON and YAML replaced, moved, removed."""

import copy
import json
import random
from typing import Any

NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 9, 15, 16, 127, 255, 4096, 2**31, 2**63, 2**64, -(2**63), 10**30,
    0.0, -0.5, 1e-320, 1e308, float("nan"), float("inf"), "", "x", "x" * 5000, "../../../etc/passwd", "/dev/zero",
    "\0", "\ud83d\ude00", [], [[]], {}, {"a": {}}, [1] * 50, "F32", "I64", "float16",
    "model-00001-of-00003.safetensors",
]  # fmt: skip


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four kinds of damage; headers, at the start, are met more often than the rest."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not out:
            break
        reach = len(out) if rng.random() < 0.4 else min(len(out), 2048)
        at = rng.randrange(reach)
        kind = rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice(b'\x00\xff\x7f\x80"{}[]:,-0129eE\\\n')
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            del out[at : at + rng.randint(1, 64)]
        elif kind == 4:
            out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 32)))
        elif kind == 5:
            other = rng.randrange(len(out))
            out[at : at + 16] = out[other : other + 16]
        else:
            out[: min(8, len(out))] = rng.choice([0, 1, 2**16, 2**31, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
    return bytes(out)


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of nested dicts and lists with one to three places changed."""
    root = {"": copy.deepcopy(tree)}
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(_places(root, rng))
        kind = rng.randrange(6)
        if kind < 3:
            holder[key] = copy.deepcopy(rng.choice(NASTY))
        elif kind == 3 and holder is not root:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[str(rng.choice(NASTY))[:40]] = holder[key]
        else:
            other, place = rng.choice(_places(root, rng))
            holder[key] = copy.deepcopy(other[place])
    return root.get("")


def _places(root: Any, rng: random.Random) -> list[tuple[Any, Any]]:
    """(container, key) of up to 400 places, every depth among them."""
    found: list[tuple[Any, Any]] = []
    waiting = [root]
    while waiting:
        node = waiting.pop(rng.randrange(len(waiting)))
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        rng.shuffle(keys)
        for key in keys[:60]:
            found.append((node, key))
            if isinstance(node[key], dict | list) and node[key]:
                waiting.append(node[key])
        if len(found) > 400:
            break
    return found


def mutate_json(text: str, rng: random.Random) -> bytes:
    """JSON with a changed tree, or with changed bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(text.encode(), rng)
    return json.dumps(mutate_tree(json.loads(text), rng)).encode("utf-8", "surrogatepass")


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with a changed header tree (its length field right or wrong), or with changed bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(mutate_tree(json.loads(data[8 : 8 + length]), rng)).encode("utf-8", "surrogatepass")
    stated = len(header) if rng.random() < 0.9 else rng.choice([0, 1, len(header) - 1, len(header) + 7, 2**62])
    return stated.to_bytes(8, "little") + header + data[8 + length :]
