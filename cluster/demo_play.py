"""What the demonstration does to a running server, as a stranger with two API keys and the admin socket would.

Owns the order of acts and the observations they yield; what they should have been is demo_checks.py's. Token ids come from
the checkpoint's own tokenizer, so that every expected hit is computed from ids, not from what the server says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from copyhold.models.tokenizer import ChatTokenizer
from copyhold.namespace.certificate import parse_certificate, verify_certificate
from copyhold.namespace.signing import PUBLIC_KEY_BYTES, parse_hex

from .admin_client import AdminClient
from .cli_output import Progress
from .demo_checks import Latency, LatencyAttempt, Turn, expected_cached, rows_with_kv
from .demo_content import LONG_REQUEST, Script
from .sdk import Client, Message, NotFoundError

TURN_TOKENS = 24
LATENCY_RUNS = 3
LONG_TOKENS = 400
REVOKE_AFTER_TOKENS = 8
_SETTLE_S = 20.0


class Player:
    """One tenant: its client, its script, and every token sequence of its namespace that has K/V."""

    def __init__(self, script: Script, url: str, api_key: str, tokenizer: ChatTokenizer) -> None:
        self.script = script
        self.url = url
        self.api_key = api_key
        self.client = Client(url, api_key)
        self._tokenizer = tokenizer
        self.history: list[list[int]] = []
        self.turns: list[Turn] = []
        self.first_messages: list[Message] = []
        self.last_prompt: list[int] = []

    @property
    def name(self) -> str:
        return self.script.tenant

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, by the checkpoint's own template."""
        return self._tokenizer.apply_chat_template([dict(message) for message in messages])

    def converse(self, block_size: int, say: Progress) -> None:
        """All turns, each with the conversation so far."""
        messages: list[Message] = [{"role": "system", "content": self.script.system}]
        for number, question in enumerate(self.script.questions, start=1):
            say("turns", f"{self.name} {number}/{len(self.script.questions)}")
            messages.append({"role": "user", "content": question})
            if number == 1:
                self.first_messages = list(messages)
            turn = self._turn(number, messages, block_size)
            self.turns.append(turn)
            messages.append({"role": "assistant", "content": turn.reply})

    def ask(self, messages: Sequence[Message], max_tokens: int = 4) -> int:
        """Send a conversation; returns its cached tokens and remembers what has K/V now."""
        prompt = self.prompt_ids(messages)
        with self.client.stream(messages, max_tokens=max_tokens, return_token_ids=True) as stream:
            stream.reply()
        assert stream.usage is not None
        self._remember(prompt, stream.token_ids, stream.finish_reason)
        return stream.usage.cached_tokens

    def expected(self, messages: Sequence[Message], block_size: int) -> int:
        """Cached tokens this tenant's own past allows for a conversation."""
        return expected_cached(self.prompt_ids(messages), self.history, block_size)

    def _turn(self, number: int, messages: Sequence[Message], block_size: int) -> Turn:
        prompt = self.prompt_ids(messages)
        self.last_prompt = prompt
        expected = expected_cached(prompt, self.history, block_size)
        with self.client.stream(messages, max_tokens=TURN_TOKENS, return_token_ids=True) as stream:
            reply = stream.reply()
        self._remember(prompt, stream.token_ids, stream.finish_reason)
        return Turn(
            tenant=self.name,
            turn=number,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            expected_cached_tokens=expected,
            time_to_first_token_ms=round(reply.time_to_first_token_s * 1e3, 1),
            reply=reply.text,
            receipt_id=reply.receipt_id,
        )

    def _remember(self, prompt: list[int], generated: Sequence[int], finish_reason: str | None) -> None:
        self.history.append(rows_with_kv(prompt, generated, finish_reason == "stop"))


def measure_latency(player: Player, attempts_most: int, good_enough: float, say: Progress) -> Latency:
    """First-token times of the tenant's last prompt with reuse, and cold: the same ids but the first."""
    prompt = player.last_prompt
    attempts: list[LatencyAttempt] = []
    while len(attempts) < attempts_most and all(attempt.ratio > good_enough for attempt in attempts):
        say("first token", f"{player.name}, attempt {len(attempts) + 1}")
        cached, cold = [], []
        for run in range(LATENCY_RUNS):
            replacement = (prompt[0] + 1 + run + LATENCY_RUNS * len(attempts)) % 1000 + 100
            cold.append(_first_token_ms(player.client, [replacement, *prompt[1:]]))
            cached.append(_first_token_ms(player.client, prompt))
        attempts.append(LatencyAttempt(tuple(cached), tuple(cold)))
    return Latency(player.name, len(prompt), tuple(attempts))


def _first_token_ms(client: Client, prompt: list[int]) -> float:
    with client.stream_complete(prompt, max_tokens=1, ignore_eos=True) as stream:
        reply = stream.reply()
    return round(reply.time_to_first_token_s * 1e3, 1)


def play_isolation(a: Player, b: Player, admin: AdminClient, block_size: int) -> dict[str, Any]:
    """B sends A's exact first prompt, twice; A sends it again; then who holds which blocks."""
    expected = block_size * ((len(a.prompt_ids(a.first_messages)) - 1) // block_size)
    observed: dict[str, Any] = {
        "b_first_cached": b.ask(a.first_messages),
        "b_second_cached": b.ask(a.first_messages),
        "a_again_cached": a.ask(a.first_messages),
        "expected_cached_tokens": expected,
    }
    held = _blocks(admin)
    blocks_a, blocks_b = set(held.get(a.name, ())), set(held.get(b.name, ()))
    observed["shared_blocks"] = sorted(blocks_a & blocks_b)
    observed["blocks_held"] = {a.name: len(blocks_a), b.name: len(blocks_b)}
    return observed


def play_explanations(player: Player) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server says of one hit (the last turn) and one miss (the first)."""
    return _explained(player.client, player.turns[-1]), _explained(player.client, player.turns[0])


def _explained(client: Client, turn: Turn) -> dict[str, Any]:
    found = client.explain(turn.receipt_id)
    return {
        "receipt_id": found.receipt_id,
        "turn": turn.turn,
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "lengths": {
            "semantic": found.lengths.semantic,
            "indexed": found.lengths.indexed,
            "cap": found.lengths.cap,
            "runtime": found.lengths.runtime,
        },
        "limit": found.limit,
        "reason": found.reason,
        "explanation": found.sentence,
    }


class LongStream:
    """A long request of the tenant to be revoked, read event by event so that anything after its error would show."""

    def __init__(self, player: Player, messages: Sequence[Message], url: str, api_key: str) -> None:
        self._body = {
            "model": player.client.models()[0],
            "messages": [dict(message) for message in messages],
            "max_tokens": LONG_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        self._url = f"{url}/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {api_key}"}
        self._thread = threading.Thread(target=self._read, name="copyhold-demo-stream", daemon=True)
        self.enough = threading.Event()
        self.texts = 0
        self.events_after_error = 0
        self.error = ""

    def __enter__(self) -> LongStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(_SETTLE_S)
        if self._thread.is_alive():
            self.error = self.error or "the stream did not end"

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=self._headers, timeout=_SETTLE_S
            ) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = self.error or type(error).__name__
        finally:
            self.enough.set()

    def _take(self, event: str) -> None:
        if self.error:
            self.events_after_error += 1
            return
        if event == "[DONE]":
            return
        chunk = msgspec.json.decode(event)
        if chunk.get("error"):
            self.error = str(chunk["error"].get("code"))
            return
        self.texts += sum(bool(choice["delta"].get("content")) for choice in chunk["choices"])
        if self.texts >= REVOKE_AFTER_TOKENS:
            self.enough.set()


def play_revocation(
    a: Player, b: Player, admin: AdminClient, block_size: int, public_key_path: Path
) -> tuple[dict[str, Any], bytes]:
    """Revoke A's namespace while A streams; returns what was observed and the certificate's bytes."""
    before = admin.status()["namespaces"][a.name]["generation"]
    blocks_before = _blocks(admin).get(b.name, [])
    messages: list[Message] = [*a.first_messages[:1], {"role": "user", "content": LONG_REQUEST}]
    old_receipt = a.turns[-1].receipt_id
    with LongStream(a, messages, a.url, a.api_key) as stream:
        stream.enough.wait(_SETTLE_S)
        started_s = time.monotonic()
        document = admin.revoke(a.name, 0.0)
        elapsed_s = time.monotonic() - started_s
    certificate = parse_certificate(document)
    ranks = [evidence for outcome in certificate.outcomes for evidence in outcome.evidence]
    key = parse_hex(public_key_path.read_text(encoding="ascii").strip(), PUBLIC_KEY_BYTES)
    assert key is not None, f"{public_key_path} holds no public key"
    report = verify_certificate(document, key)
    flipped_byte = len(document) // 2
    flipped = bytearray(document)
    flipped[flipped_byte] ^= 1
    floors = admin.pool()["replicas"][0]["floors"][a.name]
    observed: dict[str, Any] = {
        "namespace": a.name,
        "generation_before": before,
        "tokens_before": stream.texts,
        "stream_error": stream.error,
        "events_after_error": stream.events_after_error,
        "seconds": round(elapsed_s, 3),
        "certificate_ok": report.ok,
        "certificate_outcome": certificate.outcome,
        "not_covered": list(certificate.not_covered),
        "flipped_byte": flipped_byte,
        "flipped_certificate_ok": verify_certificate(bytes(flipped), key).ok,
        "free_blocks_before": floors["free_blocks_before"],
        "free_blocks_after": floors["free_blocks_after"],
        "grown_blocks": floors["grown_blocks"],
        **certified_ranks(ranks),
        "b_blocks_before": blocks_before,
        "b_blocks_after": _blocks(admin).get(b.name, []),
        "old_receipt_error": _receipt_error(a.client, old_receipt),
        "a_next_cached": _fresh_ask(a),
        "generation_after": admin.status()["namespaces"][a.name]["generation"],
        "b_expected_cached": b.expected(b.first_messages, block_size),
        "b_cached": b.ask(b.first_messages),
    }
    return observed, document


def certified_ranks(ranks: Sequence[Any]) -> dict[str, Any]:
    """Per rank: what was released, zeroed and found when read back."""
    return {
        "certified_blocks_released": min((rank.blocks_released for rank in ranks), default=0),
        "ranks": [
            {
                "rank": rank.rank,
                "inventory_before_blocks": rank.inventory_before_blocks,
                "inventory_after_blocks": rank.inventory_after_blocks,
                "blocks_released": rank.blocks_released,
                "blocks_zeroed": rank.blocks_zeroed,
                "bytes_zeroed": rank.bytes_zeroed,
                "nonzero_bytes": rank.nonzero_bytes,
            }
            for rank in ranks
        ],
    }


def _fresh_ask(player: Player) -> int:
    """The tenant's first prompt under the new generation, which knows nothing of the old one."""
    player.history.clear()
    return player.ask(player.first_messages)


def _receipt_error(client: Client, receipt_id: str) -> str:
    try:
        client.receipts(receipt_id)
    except NotFoundError:
        return "not_found"
    return "still there"


def _blocks(admin: AdminClient) -> dict[str, list[int]]:
    """Blocks by namespace over all replicas (one replica: ids are unique)."""
    held: dict[str, list[int]] = {}
    for replica in admin.pool()["replicas"]:
        for namespace, blocks in replica["namespaces"].items():
            held.setdefault(namespace, []).extend(blocks)
    return held
