"""Slots as llama-server's clients use them, and a server's prompt cache on disk."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from full_disk import room_for
from tiny_server import client_of, key_of, metrics_of

from hotset.backends.base import BLOCK_SIZE
from hotset.server.app import create_app

PROMPT = "a quick brown fox is " * 10  # 210 tokens, and the beginning of a text
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


async def ask(client: httpx.AsyncClient, **how: Any) -> tuple[str, int]:
    """Return the answer, and the number of the prompt's tokens that were in the cache."""
    reply = await client.post("/v1/completions", json={"prompt": PROMPT} | GREEDY | how)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


async def act(client: httpx.AsyncClient, action: str, slot: int = 0, **body: Any) -> httpx.Response:
    return await client.post(f"/slots/{slot}?action={action}", json=body)


async def test_a_slot_is_saved_restored_and_erased(path: Path, tmp_path: Path) -> None:
    async with client_of(path, slot_save_path=str(tmp_path)) as (client, _):
        expected = (await ask(client))[0]
        saved = (await act(client, "save", filename="one.bin")).json()
        n_bytes = (tmp_path / "one.bin").stat().st_size
        assert saved.pop("timings")["save_ms"] > 0
        assert saved == {"id_slot": 0, "filename": "one.bin", "n_saved": 3 * BLOCK_SIZE, "n_written": n_bytes}
    async with client_of(path, slot_save_path=str(tmp_path)) as (client, _):
        restored = (await act(client, "restore", filename="one.bin")).json()
        assert restored.pop("timings")["restore_ms"] > 0
        n_bytes = (tmp_path / "one.bin").stat().st_size
        assert restored == {
            "id_slot": 0, "filename": "one.bin", "n_restored": 3 * BLOCK_SIZE, "n_read": n_bytes,
        }  # fmt: skip
        assert await ask(client) == (expected, 3 * BLOCK_SIZE)
        erased = await client.post("/slots/0?action=erase")
        assert erased.json() == {"id_slot": 0, "n_erased": 3 * BLOCK_SIZE}
        assert await ask(client) == (expected, 0)
        assert (await act(client, "erase", 1)).json() == {"id_slot": 1, "n_erased": 0}


async def test_a_full_disk_keeps_the_older_file_of_a_slot(path: Path, tmp_path: Path) -> None:
    async with client_of(path, slot_save_path=str(tmp_path)) as (client, _):
        await ask(client)
        assert (await act(client, "save", filename="one.bin")).status_code == 200
        older = (tmp_path / "one.bin").read_bytes()
        await ask(client, prompt="b" * 250)
        with room_for(1000):
            refused = await act(client, "save", filename="one.bin")
        assert refused.status_code >= 400
        message = refused.json()["error"]["message"]
        assert message.endswith("cannot be written (File too large); choose another place.")
        assert message.count(". ") == 0
        assert (tmp_path / "one.bin").read_bytes() == older
        assert (await act(client, "save", filename="one.bin")).status_code == 200


async def test_a_request_names_its_slot(path: Path, tmp_path: Path) -> None:
    async with client_of(path, slot_save_path=str(tmp_path), load={"n_seqs": 4}) as (client, _):
        await ask(client, id_slot=2)
        await ask(client, prompt="b" * 100, id_slot=-1)
        for slot, n in ((2, 3), (0, 1), (1, 0)):
            saved = (await act(client, "save", slot, filename=f"{slot}")).json()
            assert saved["n_saved"] == n * BLOCK_SIZE
        wrong = await client.post("/v1/completions", json={"prompt": "a", "id_slot": 4})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "id_slot")
        assert "this server has 4" in wrong.json()["error"]["message"]


async def test_wrong_requests_are_refused(path: Path, tmp_path: Path) -> None:
    async with client_of(path, slot_save_path=str(tmp_path)) as (client, _):
        await ask(client)
        for name in ("", "../x", "a/b", "/etc/passwd", ".hidden", "a" * 300, "a\n", None):
            reply = await act(client, "save", filename=name)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "filename")
        for action, slot, status in (
            ("save", 4, 400),
            ("save", -1, 400),
            ("other", 0, 400),
            ("restore", 0, 404),
        ):
            reply = await act(client, action, slot, filename="none")
            assert reply.status_code == status
            assert str(tmp_path) not in reply.text
        assert (await client.post("/slots/0", json={"filename": "x"})).status_code == 400
        await act(client, "save", filename="good")
        whole = (tmp_path / "good").read_bytes()
        (tmp_path / "damaged").write_bytes(whole[:120] + b"\0" + whole[121:])
        reply = await act(client, "restore", filename="damaged")
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "damaged is damaged."
        (tmp_path / "good").write_bytes(whole[:-1])
        assert (await act(client, "restore", filename="good")).json()[
            "n_restored"
        ] == 3 * BLOCK_SIZE  # still in memory
        other = whole[:8] + bytes(16) + whole[24:]
        (tmp_path / "other").write_bytes(other)
        assert (await act(client, "restore", filename="other")).status_code == 400
    async with client_of(path, slot_save_path=str(tmp_path), load={"kv_type": "f32"}) as (client, _):
        (tmp_path / "good").write_bytes(b"")
        await ask(client)
        await act(client, "save", filename="good")
    async with client_of(path, slot_save_path=str(tmp_path)) as (client, _):
        reply = await act(client, "restore", filename="good")
        assert reply.status_code == 400
        assert "was saved by another model" in reply.json()["error"]["message"]


async def test_saved_slots_have_a_limit(path: Path, tmp_path: Path) -> None:
    """The limit applies to all files of the folder. A file that is replaced does not count."""
    async with client_of(path, slot_save_path=str(tmp_path)) as (client, service):
        await ask(client)
        n_bytes = (await act(client, "save", filename="one")).json()["n_written"]
        disk = -(-n_bytes // 4096) * 4096
        whole = (tmp_path / "one").read_bytes()
        decided = service.model.decided
        for room, saves in ((disk + n_bytes, True), (disk + n_bytes - 1, False), (n_bytes, False)):
            (tmp_path / "two").unlink(missing_ok=True)
            settings = replace(decided.settings, cache_disk=room / 2**30)
            service.model.decided = replace(decided, settings=settings)
            assert (await act(client, "save", filename="one")).status_code == 200
            reply = await act(client, "save", filename="two")
            assert reply.status_code == (200 if saves else 507), reply.text
            assert (tmp_path / "two").exists() == saves
        assert reply.json()["error"]["code"] == "slots_full"
        assert "--cache-disk" in reply.json()["error"]["message"]
        service.model.decided = replace(decided, settings=replace(decided.settings, cache_disk=1e-6))
        assert (await act(client, "save", filename="one")).status_code == 507
        assert (tmp_path / "one").read_bytes() == whole
        assert [one.name for one in tmp_path.iterdir()] == ["one"]


async def test_a_file_of_another_kind_is_not_replaced(path: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    async with client_of(path, slot_save_path=str(tmp_path)) as (client, _):
        reply = await act(client, "save", filename="model.gguf")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "filename")
        assert reply.json()["error"]["message"].startswith(
            "model.gguf exists and is not a file of cache blocks"
        )
        for _ in range(2):
            assert (await act(client, "save", filename="own")).status_code == 200
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF"


async def test_slots_are_for_keys_that_manage(path: Path, tmp_path: Path) -> None:
    """Otherwise one key could erase another key's slot and replace its files."""
    keys = key_of("alice", manages=False), key_of("root", manages=True)
    async with client_of(path, slot_save_path=str(tmp_path), named_keys=keys) as (client, _):
        for name, status in (("alice", 403), ("root", 200)):
            for action in ("save", "restore", "erase"):
                reply = await client.post(
                    f"/slots/0?action={action}",
                    json={"filename": "x"},
                    headers={"authorization": f"Bearer {name}"},
                )
                assert reply.status_code == status, reply.text


async def test_without_keys_only_this_machine_may_use_slots(path: Path, tmp_path: Path) -> None:
    async with client_of(path, slot_save_path=str(tmp_path)) as (client, service):
        transport = httpx.ASGITransport(create_app(service), client=("10.0.0.5", 7))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as remote:
            assert [(await act(one, "erase")).status_code for one in (client, remote)] == [200, 403]


async def test_without_a_folder_nothing_is_saved(client: httpx.AsyncClient) -> None:
    reply = await act(client, "save", filename="x")
    assert reply.status_code == 501
    assert "--slot-save-path" in reply.json()["error"]["message"]


async def test_a_model_that_does_not_only_use_the_cpu_is_refused(path: Path, tmp_path: Path) -> None:
    async with client_of(path, slot_save_path=str(tmp_path), load={"device": "reference"}) as (client, _):
        assert (await ask(client))[0]
        reply = await act(client, "save", filename="x")
        assert reply.status_code == 501
        assert (
            "--slot-save-path needs the whole model on this machine's CPU" in reply.json()["error"]["message"]
        )


async def test_answers_after_a_restart_are_the_same_and_counted(path: Path, tmp_path: Path) -> None:
    found: list[tuple[str, int]] = []
    counted: list[dict[str, float]] = []

    for _ in range(2):
        async with client_of(path, load={"cache_dir": tmp_path, "cache_disk": "100M"}) as (client, service):
            found.append(await ask(client))
            cache = service.model.engine.scheduler.prompt_cache
            assert cache is not None
            await service.in_thread(cache.flush)
            counted.append(await metrics_of(client))
    assert found == [(found[0][0], 0), (found[0][0], 3 * BLOCK_SIZE)]
    first, second = counted
    assert first["hotset_prompt_cache_blocks_written_total"] == 3
    assert first["hotset_prompt_cache_bytes"] == sum(one.stat().st_size for one in tmp_path.glob("*/*.kv"))
    assert second["hotset_prompt_cache_blocks_read_total"] == 3
    assert second["hotset_restored_prompt_tokens_total"] == 3 * BLOCK_SIZE
    assert second["hotset_prompt_cache_blocks_written_total"] == 0


async def test_several_clients_get_the_same_answers_after_a_restart(path: Path, tmp_path: Path) -> None:
    prompts = ["{} {}".format("shared beginning " * 8, letter * 60) for letter in "abcdefgh"]
    found: list[list[tuple[str, int]]] = []

    for _ in range(2):
        async with client_of(path, load={"cache_dir": tmp_path, "n_seqs": 16}) as (client, _):
            asked = [ask(client, prompt=prompt, temperature=1, seed=3) for prompt in prompts]
            found.append(list(await asyncio.gather(*asked)))
    first, second = found
    assert [text for text, _ in first] == [text for text, _ in second]
    assert all(cached == 3 * BLOCK_SIZE for _, cached in second)


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_another_method_is_refused(method: str, client: httpx.AsyncClient) -> None:
    assert (await client.request(method, "/slots/0")).status_code == 405
