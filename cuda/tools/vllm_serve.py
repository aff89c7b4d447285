"""`vllm serve PACKED` answers an OpenAI request; its answer stands beside comet's own."""

import argparse
import json
import os
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from vllm_engines import CACHES, on_cpu
from vllm_forks import in_a_fork, say, time_left

TOKENS = 24


def serve(args: argparse.Namespace) -> None:
    """Start the server with the command's own words, ask it once, print what it says and how long it took."""
    answer = in_a_fork("vllm serve", time_left(args.limit), lambda: asked(args))
    if answer is None:
        raise SystemExit("the server did not answer")
    say("vllm serve, after", f"{answer['ready']:.1f} s:", repr(args.prompt), "->", repr(answer["text"]))
    ours = in_a_fork("comet", time_left(args.limit), lambda: by_comet(args))
    say("comet:", repr(args.prompt), "->", repr(ours))
    if not answer["text"].strip() or answer["tokens"] != TOKENS:
        raise SystemExit(f"the server's answer is not {TOKENS} tokens of text: {answer}")


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The answer of a server that this process starts and leaves to `in_a_fork` to end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin = time.perf_counter()
    server = os.fork()
    if server == 0:
        command(args.packed, port, CACHES[args.cache], eager=not args.compile)
        os._exit(0)
    address = f"http://127.0.0.1:{port}"
    while True:  # until the fork's limit
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2)
            break
        except OSError as error:
            if os.waitpid(server, os.WNOHANG)[0]:
                raise RuntimeError("the server has ended") from error
            time.sleep(0.2)
    ready = time.perf_counter() - begin
    body = {"model": args.packed, "prompt": args.prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
    return {"ready": ready, "text": answer["choices"][0]["text"], "tokens": answer["usage"]["completion_tokens"]}


def command(packed: str, port: int, options: dict[str, Any], *, eager: bool) -> None:
    """What the shell's `vllm serve PACKED ...` does."""
    from vllm.entrypoints.cli.main import main

    words = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--no-enable-prefix-caching"]
    words += ["--enforce-eager"] if eager else []
    words += [] if on_cpu() else ["--gpu-memory-utilization", "0.3"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    sys.argv = ["vllm", "serve", packed, *words]
    main()


def by_comet(args: argparse.Namespace) -> str:
    """comet's greedy continuation."""
    from comet_core.evaluate import continue_prompt

    return continue_prompt(str(Path(args.packed)), args.prompt, TOKENS)
