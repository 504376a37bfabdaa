"""The cost of several machines, on a cluster of Ray nodes on this one: the front, and a stage's boundary.

    python bench/scale.py front [MODEL] [--tokens 200] [--rounds 3]    # one stream, plain and one replica
    python bench/scale.py stages [MODEL] [--tokens 100] [--rounds 5]   # one, two and three stages
    python bench/scale.py hop [--rounds 3]                             # a piece of a step there and back
    python bench/scale.py prefixes [MODEL]                             # 8 conversations over 2 replicas
    python bench/scale.py simulate [--hop MS] [--rate GBs] ...         # 70B over 2, 4 and 8 machines

All but the last are measurements. The last one computes, from their numbers, results that need more machines.
Each prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import peers
import psutil
import serve_load

PORT = 18100
NAME = "bench"  # the model's name in requests


@contextmanager
def cluster(names: str) -> Iterator[str]:
    """Start a cluster on this machine, with a node for each letter; yield its address."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    found = Cluster()
    for name in names:
        more = {"include_dashboard": False} if name == names[0] else {}
        found.add_node(num_cpus=4, node_name=name, object_store_memory=200 << 20, **more)
    try:
        yield found.address
    finally:
        ray.shutdown()
        found.shutdown()


def command(model: str, threads: int, *more: str) -> list[str]:
    base = [sys.executable, "-m", "hotset.cli.main", "serve", model, "--port", str(PORT), "-t", str(threads)]
    return [*base, "-a", NAME, "-c", "2048", *more]


def front(args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"plain": [], "one replica": []}
    with cluster("a") as address:
        commands = {
            "plain": command(args.model, args.threads),
            "one replica": command(args.model, args.threads, "--replicas", "1", "--ray", address),
        }
        for i in range(args.rounds):
            for name, line in commands.items():
                with serve_load.running(line, PORT) as server:
                    client = serve_load.Client(server.url, i)
                    asyncio.run(client.ask(serve_load.SHORT, 20))
                    found = [asyncio.run(client.ask(serve_load.SHORT, args.tokens)) for _ in range(3)]
                    rates[name].append(statistics.median(one.decode_rate for one in found))
    overhead = statistics.median(a / b - 1 for a, b in zip(rates["plain"], rates["one replica"], strict=True))
    peers.print_table(["server", "tokens/s, one stream"], [[k, f"{max(v):.1f}"] for k, v in rates.items()])
    return {"rates": rates, "overhead": overhead}


def stages(args: argparse.Namespace) -> dict[str, Any]:
    import hotset
    from hotset.scale.cluster import connect
    from hotset.scale.stages import load_staged
    from hotset.settings import LoadSettings

    settings = LoadSettings(n_ctx=2048, n_threads=args.threads, n_seqs=4, device="cpu")
    times: dict[str, list[float]] = {}
    computed: dict[str, list[float]] = {}  # processor seconds of all processes of a model
    with cluster("abc") as address:
        connect(address)
        with hotset.load(args.model, settings) as model:
            n = model.graph.n_layer
        splits = [f"a:{n}", f"a:{n // 2},b:{n - n // 2}", f"a:{n // 3},b:{n // 3},c:{n - 2 * (n // 3)}"]
        for spec in splits:
            with load_staged(args.model, settings, spec, address) as model:
                for _ in range(args.rounds):
                    before = processor_seconds()
                    answer = model.generate("Rivers", temperature=0, max_tokens=args.tokens, ignore_eos=True)
                    computed.setdefault(spec, []).append(1e3 * (processor_seconds() - before) / args.tokens)
                    times.setdefault(spec, []).append(1e3 / answer.timings.predicted_per_second)
    boundaries = {}
    for name, found in (("ms", times), ("processor_ms", computed)):
        one, two, three = (min(values) for values in found.values())
        boundaries[name] = [two - one, (three - one) / 2]
    rows = [[spec, f"{min(times[spec]):.2f}", f"{min(computed[spec]):.2f}"] for spec in splits]
    peers.print_table(["stages", "ms a token, the least", "of processors, the least"], rows)
    return {"ms": times, "processor_ms": computed, "boundary": boundaries}


_WIDTH = 4096  # of the rows that `hop` sends


_MOST = 64 << 20  # bytes of a piece


def hop(args: argparse.Namespace) -> dict[str, Any]:
    """Measure sending a piece of a step to another process and back, in ms."""
    import numpy as np

    from hotset.backends.base import Batch
    from hotset.scale.links import Channel, new_keys
    from hotset.scale.messages import Message

    keys = new_keys()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs, keys[0]), daemon=True)
    process.start()
    address, key = ours.recv()
    times: dict[str, list[float]] = {}
    with Channel(keys, key, _MOST) as channel:
        channel.connect(address)
        for n in (1, 16, 256):
            count = np.arange(n, dtype=np.int32)
            batch = Batch(count, count, np.zeros(n, np.int32), np.zeros((16, 32), np.int32), count[-1:])
            rows = np.random.default_rng(0).standard_normal((n, _WIDTH)).astype(np.float32)
            found = times[f"{n} x {_WIDTH}"] = []
            for _ in range(args.rounds * (1000 // n + 40)):
                began = time.perf_counter()
                channel.send(Message(1, batch, rows))
                channel.receive()
                found.append(1e3 * (time.perf_counter() - began))
    process.join()
    least = {of: min(each) for of, each in times.items()}
    middle = {of: statistics.median(each) for of, each in times.items()}
    rows = [[of, f"{middle[of]:.3f}", f"{least[of]:.3f}"] for of in times]
    peers.print_table(["piece", "there and back, ms", "the least"], rows)
    return {"ms": middle, "least_ms": least}


def _echo(pipe: Any, key: bytes) -> None:
    """Run the other process of `hop`: send back each message."""
    from hotset.scale.links import LOST, Channel, new_keys

    keys = new_keys()
    with suppress(*LOST), Channel(keys, key, _MOST) as channel:
        pipe.send((channel.listen("127.0.0.1"), keys[0]))
        channel.wait(60)
        while True:
            channel.send(channel.receive())


def processor_seconds() -> float:
    """Return the processor seconds of this process and of the stages."""
    seconds = 0.0
    for process in psutil.process_iter(["name", "pid"]):
        if process.pid == os.getpid() or process.info["name"].startswith("ray::Stage"):
            seconds += sum(process.cpu_times()[:2])
    return seconds


def conversations(url: str, n_turns: int = 4) -> int:
    """Return the cached tokens of 8 conversations that take turns."""
    import httpx

    cached = 0
    with httpx.Client(base_url=url, timeout=600) as client:
        system = {"role": "system", "content": "You are of help to everyone who asks. " * 12}
        talks = [
            [system, {"role": "user", "content": f"Talk {i}. " + f"Tell me of {i}. " * 30}] for i in range(8)
        ]
        for _ in range(n_turns):
            for i, talk in enumerate(talks):
                body = {"model": NAME, "messages": talk, "max_tokens": 24, "temperature": 0}
                reply = client.post("/v1/chat/completions", json=body).json()
                cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                talk.append(reply["choices"][0]["message"])
                talk.append({"role": "user", "content": f"And {i}, and then? " * 8})
    return cached


def prefixes(args: argparse.Namespace) -> dict[str, Any]:
    from hotset.scale.replicas import Replicas

    found: dict[str, int] = {}
    with cluster("ab") as address:
        more = {"one replica": ["--replicas", "1", "--contexts", "8"], "two": ["--replicas", "2"]}
        for name, options in more.items():
            line = command(args.model, args.threads, *options, "--ray", address)
            with serve_load.running(line, PORT) as server:
                found[name] = conversations(server.url)
        found["two, at random"] = _at_random(args, address, Replicas(least=2, by_prefix=False))
    rows = [[name, str(n), f"{n / found['one replica']:.0%}"] for name, n in found.items()]
    peers.print_table(["replicas", "tokens found in the cache", "of one with all the memory"], rows)
    return found


def _at_random(args: argparse.Namespace, address: str, replicas: Any) -> int:
    """Return the same with randomly distributed requests, for which the command line has no option."""
    script = (
        "import sys; from hotset.scale.replicas import *; from hotset.storage import resolve\n"
        f"serve_replicas({args.model!r}, LoadSettings(n_ctx=2048, n_threads={args.threads}, n_seqs=4), "
        f"ServerSettings(port={PORT}), ('m',), {replicas!r}, {address!r}, print)"
    )
    with serve_load.running([sys.executable, "-c", script], PORT) as server:
        return conversations(server.url)


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """Compute the speeds of one stream and of several.

    One stream: every byte is read once per token, on any machine, and each boundary is a hop. Several: the
    pieces of a step follow one another, so that a step takes the time of n + stages - 1 pieces.
    """
    n_bytes, width = args.size * 2**30, 8192
    latency, row = args.hop / 1e3, width * 4 / (args.network * 1e9 / 8)
    rows, found = [], {}
    for n in (1, 2, 4, 8):
        one = n_bytes / (args.rate * 1e9) + (n - 1) * (latency + row)
        # A step reads the weights once; every token after the first takes `each` of its time in addition.
        n_pieces = min(n, 4)
        of_stage = n_bytes / n / (args.rate * 1e9) * (1 + args.each * (16 / n_pieces - 1))
        sixteen = (n_pieces + n - 1) * (of_stage + (latency + row * 16 / n_pieces) * (n > 1))
        fits = n_bytes / n <= args.memory * 2**30
        found[n] = {"one": 1 / one, "sixteen": 16 / sixteen, "fits": fits}
        rows.append(
            [
                str(n),
                f"{args.size / n:.1f} GiB" + ("" if fits else ", too much"),
                f"{1 / one:.2f}",
                f"{16 / sixteen:.2f}",
            ]
        )
    heads = ["machines", "on each", "tokens/s, one stream", "tokens/s, 16 streams"]
    peers.print_table(heads, rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("front", "stages", "hop", "prefixes", "simulate"))
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument(
        "--size",
        type=float,
        default=36.9,
        help="simulate: GiB of the model (70B in Q4_K_M: 39.6, Q4_0: 36.9)",
    )
    parser.add_argument("--memory", type=float, default=24, help="simulate: GiB that a machine has for it")
    parser.add_argument(
        "--rate", type=float, default=40, help="simulate: GB/s of weights that a machine reads"
    )
    parser.add_argument("--hop", type=float, default=1, help="simulate: ms of Ray's latency")
    parser.add_argument("--network", type=float, default=1, help="simulate: Gbit/s")
    parser.add_argument(
        "--each", type=float, default=0.31, help="simulate: time of each additional token in a step"
    )
    args = parser.parse_args()
    kinds = {"front": front, "stages": stages, "hop": hop, "prefixes": prefixes, "simulate": simulate}
    found = kinds[args.what](args)
    print()
    peers.print_json(f"scale {args.what}", machine=peers.machine(), found=found)


if __name__ == "__main__":
    main()
