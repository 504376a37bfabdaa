"""How much time does a token of a long answer cost the chat page? Milliseconds of the main thread per event.

usage: python bench/page.py [--tokens 10000] [--force]

The page runs in Chromium in front of a server that replays one stream (tests/support/fake_chat_server.py):
headings, lists, code, tables, quotes and formulas, each token with the activity of 30 layers as
`hotset serve` sends it. In the first and the last thousand tokens, each token waits until the
previous one is rendered and painted; the others arrive as fast as possible. Chromium's trace gives the main
thread's CPU time from one event to the next: parsing, Markdown, style, layout, the heat map and painting.
Other programs hardly change CPU times, or the ratio of two parts of one answer.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import peers

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import browser
from chat_page import PROSE
from fake_chat_server import FakeServer, Hold, facts, served, token

PART = 1000  # tokens at each end that wait for each other
N_LAYERS = 30
CHARACTERS = 4  # of a token
TARGET = 1.5  # the last thousand tokens against the first, at most
CATEGORIES = ["toplevel", "blink.user_timing"]
MARK, TASK = "hotset.event", "ThreadControllerImpl::RunTask"

# Hands the events of an answer to the page: one at a time at both ends of it, and asks the server for
# permission at the borders. An answer that is rendered has its attribute aria-busy written; two frames later
# it is painted.
REPLAY = """([part, n, mark]) => {
    const plain = window.fetch.bind(window);
    const rendered = () => new Promise((done) => {
        const frame = (then) => requestAnimationFrame(then);
        const observer = new MutationObserver(() => {
            observer.disconnect();
            frame(() => frame(() => { const { port1, port2 } = new MessageChannel();
                                      port1.onmessage = done; port2.postMessage(0); }));
        });
        const where = document.querySelector("#messages");
        observer.observe(where, { subtree: true, attributes: true, attributeFilter: ["aria-busy"] });
    });
    window.fetch = async (...args) => {
        const response = await plain(...args);
        if (!String(args[0]).endsWith("chat/completions")) return response;
        let i = 0, rest = "";
        const transform = async (text, controller) => {
            const events = (rest + text).split("\\n\\n");
            rest = events.pop();
            for (const event of events) {
                if (!event.includes('"activity"')) { controller.enqueue(`${event}\\n\\n`); continue; }
                if (i % part === 0 && (i <= part || i === n - part)) await plain(`/hold/${i}`);
                const alone = i < part || i >= n - part, seen = alone ? rendered() : null;
                if (alone) performance.mark(mark);
                controller.enqueue(`${event}\\n\\n`);
                await seen;
                i++;
                if (i === n) await plain(`/hold/${i}`);
            }
        };
        const one = new TransformStream({ transform });
        const body = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(one);
        return new Response(body.pipeThrough(new TextEncoderStream()), response);
    };
}"""


def stream(n_tokens: int) -> list[Any]:
    """Return the tokens of the answer, with their activity."""
    text = PROSE * (n_tokens * CHARACTERS // len(PROSE) + 1)
    return [
        token(
            i,
            text[CHARACTERS * i : CHARACTERS * (i + 1)],
            [((37 * i + 11 * layer) % 100) / 250 for layer in range(N_LAYERS)],
        )
        for i in range(n_tokens)
    ]


def per_event(trace: bytes) -> tuple[list[float], float]:
    """Return the main thread's CPU milliseconds from each event to the next, and its longest task."""
    events = json.loads(trace)["traceEvents"]
    marks = [event for event in events if event["name"] == MARK]
    if not marks:
        sys.exit("The trace of this Chromium has no marks of the page, so there are no results.")
    thread = marks[0]["pid"], marks[0]["tid"]
    tasks = [
        event
        for event in events
        if event["name"] == TASK and "tdur" in event and (event["pid"], event["tid"]) == thread
    ]
    times = sorted(event["ts"] for event in marks)
    spent = [0.0] * len(times)
    for task in tasks:
        # An event is delivered in a task, as its first part.
        at = bisect.bisect(times, task["ts"] + task["dur"]) - 1
        if at >= 0:
            spent[at] += task["tdur"] / 1000
    return spent[:-1], max(task["tdur"] for task in tasks) / 1000


def part_of_answer(chromium: Any, page: Any, begin: Hold, end: Hold) -> dict[str, Any]:
    begin.reached.wait()
    page.wait_for_timeout(500)  # until the previous tokens are rendered
    chromium.start_tracing(page=page, categories=CATEGORIES)
    begin.go_on.set()
    end.reached.wait()
    spent, longest = per_event(chromium.stop_tracing())
    return {
        "events": len(spent),
        "median": statistics.median(spent),
        "p99": statistics.quantiles(spent, n=100)[-1],
        "longest_task": longest,
    }


def heap(session: Any) -> float:
    """Return the MB of the JavaScript heap, without garbage."""
    session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"]) / 1e6


def measure(n_tokens: int) -> dict[str, Any]:
    server = FakeServer()
    server.props = {"hotset": facts(N_LAYERS)}
    server.replies.append(stream(n_tokens))
    holds = {i: Hold() for i in (0, PART, n_tokens - PART, n_tokens)}

    @server.app.get("/hold/{i}")
    async def hold(i: int) -> None:
        holds[i].reached.set()
        while not holds[i].go_on.is_set():
            await asyncio.sleep(0.005)

    with served(server.app) as url, browser.launched() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.locator("#model", has_text="layers").wait_for()
        session = page.context.new_cdp_session(page)
        before = heap(session)
        page.evaluate(REPLAY, [PART, n_tokens, MARK])
        page.fill("#ask", "go")
        page.press("#ask", "Enter")
        first = part_of_answer(chromium, page, holds[0], holds[PART])
        holds[PART].go_on.set()
        last = part_of_answer(chromium, page, holds[n_tokens - PART], holds[n_tokens])
        holds[n_tokens].go_on.set()
        page.locator(".note", has_text=f"{n_tokens} tokens").wait_for()
        session.send("Performance.enable")
        metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        return {
            "first": first,
            "last": last,
            "heap_before": before,
            "heap_after": heap(session),
            "nodes": metrics["Nodes"],
            "chromium": chromium.version,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=10_000, help=f"of the answer, more than {2 * PART}")
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    if args.tokens <= 2 * PART:
        parser.error(f"--tokens must be more than {2 * PART}")
    if browser.find() is None:
        sys.exit("No Chromium: tests/support/prepare.py fetches one, or name it in HOTSET_CHROMIUM.")
    peers.wait_until_quiet(args.force)
    found = measure(args.tokens)
    first, last = found["first"], found["last"]
    names = {
        "median": "event, median",
        "p99": "event, 99th percentile",
        "longest_task": "longest task (delays a frame)",
    }
    rows = []
    for name, label in names.items():
        ratio = last[name] / first[name]
        judged = peers.verdict(ratio <= TARGET) if name != "longest_task" else ""
        rows.append([label, f"{first[name]:.2f}", f"{last[name]:.2f}", f"{ratio:.2f}", judged])
    print(f"\n{args.tokens} tokens, Chromium {found['chromium']}, main thread's CPU time in ms\n")
    peers.print_table(["", f"first {PART}", f"last {PART}", "ratio", f"target {TARGET}"], rows)
    print(
        f"\nJavaScript's heap {found['heap_before']:.1f} MB before, {found['heap_after']:.1f} MB after; "
        f"{found['nodes']:.0f} nodes\n"
    )
    peers.print_json("page", **peers.machine(), tokens=args.tokens, target=TARGET, **found)


if __name__ == "__main__":
    main()
