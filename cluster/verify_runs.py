"""The runs of ``copyhold verify`` that a scheduler drives: cold, chunked, hit, warm, after eviction, preempted, shared.

Each makes a replica in this process whose memory and step sizes force what it is about, serves the prompts and counts what
happened. The namespaces ``alone-N`` keep prompts from sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from copyhold.actors.in_process import InProcessReplica, InProcessStream, ReplicaShape
from copyhold.kernels.choices import SharedPrefix
from copyhold.models.cold_run import ColdResult, cold_run
from copyhold.models.shard_set import ShardSet

from .verify_measure import Compared, RunFound
from .verify_plan import VerifyCase, VerifyPrompts

Cold = Mapping[tuple[int, ...], ColdResult]
Prompt = tuple[int, ...]


class ScheduledRuns:
    """All scheduled runs of one case on shards that are loaded once."""

    def __init__(self, shards: ShardSet, case: VerifyCase, prompts: VerifyPrompts, cold: Cold) -> None:
        self._shards, self._case, self._prompts, self._cold = shards, case, prompts, cold

    def all(self) -> dict[str, Callable[[], RunFound]]:
        """By name, in the order to run them."""
        runs = {
            "one-shot": self.one_shot,
            "chunked": self.chunked,
            "prefix hit": self.prefix_hit,
            "warm": self.warm,
            "after eviction": self.after_eviction,
            "preempted": self.preempted,
        }
        if not self._shards.deterministic:
            runs["shared reads, hydragen"] = lambda: self.shared_reads("hydragen")
            runs["shared reads, chunk"] = lambda: self.shared_reads("chunk")
        return runs

    def one_shot(self) -> RunFound:
        """Every prompt in one chunk, all in one batch, nothing shared: the scheduler and the batch change nothing."""
        replica = self._replica(self._room(len(self._prompts.prompts)))
        streams = self._apart(replica)
        return self._found("one-shot", replica, streams, ("steps",), ["alone-0"])

    def chunked(self) -> RunFound:
        """Prompts cut into pieces that are no multiple of anything, mixed with the decoding of others."""
        replica = self._replica(self._room(len(self._prompts.prompts)), chunk_tokens=19, step_tokens=31)
        streams = self._apart(replica)
        return self._found("chunked", replica, streams, ("partial_chunks",), ["alone-0"])

    def prefix_hit(self) -> RunFound:
        """One prompt first, then all others at once: they read its first blocks from the index, together."""
        replica = self._replica(self._room(len(self._prompts.prompts)))
        first, *others = self._prompts.prompts
        streams = replica.serve([first], "tenant", self._prompts.new_tokens)
        streams += replica.serve([*others, first], "tenant", self._prompts.new_tokens)
        prompts = [first, *others, first]
        needed = ("cached_tokens", *self._each_group("shared_reads"))
        return self._found(
            "prefix hit", replica, list(zip(prompts, streams, strict=True)), needed, ["tenant"]
        )

    def warm(self) -> RunFound:
        """All prompts twice; the second time everything up to the last block is cached."""
        replica = self._replica(self._room(len(self._prompts.prompts)), chunk_tokens=27)
        replica.serve(self._prompts.prompts, "tenant", self._prompts.new_tokens)
        before = replica.counts["cached_tokens"]
        streams = replica.serve(self._prompts.prompts, "tenant", self._prompts.new_tokens)
        replica.counts["cached_tokens"] -= before
        pairs = list(zip(self._prompts.prompts, streams, strict=True))
        needed = ("cached_tokens", *self._each_group("shared_reads"))
        return self._found("warm", replica, pairs, needed, ["tenant"])

    def shared_reads(self, mode: Literal["hydragen", "chunk"]) -> RunFound:
        """A cached prefix, then all prompts at once through the kernels that read it once for all of them."""
        replica = self._replica(self._room(len(self._prompts.prompts)), shared_prefix=mode)
        prompts = self._prompts.prompts
        replica.serve(prompts[:1], "tenant", self._prompts.new_tokens)
        streams = replica.serve(prompts, "tenant", self._prompts.new_tokens)
        for group, name in enumerate(self._each_group(f"{mode}_steps")):
            replica.counts[name] = replica.attention_steps(group)[mode]
        pairs = list(zip(prompts, streams, strict=True))
        needed = (*self._each_group(f"{mode}_steps"), *self._each_group("shared_reads"))
        return self._found(f"shared reads, {mode}", replica, pairs, needed, ["tenant"])

    def after_eviction(self) -> RunFound:
        """Memory for one prompt and a little: others push it out, then it comes again, then again, warm."""
        first = self._prompts.prompts[0]
        replica = self._replica(self._room(1) + 1)
        pairs: list[tuple[Prompt, InProcessStream]] = []
        for number, prompt in enumerate((first, *self._prompts.prompts[1:], first, first)):
            namespace = "tenant" if prompt == first else f"other-{number}"
            pairs += [
                (prompt, stream) for stream in replica.serve([prompt], namespace, self._prompts.new_tokens)
            ]
        return self._found("after eviction", replica, pairs, ("evicted", "cached_tokens"), ["tenant"])

    def preempted(self) -> RunFound:
        """Two requests are admitted that cannot both grow: the younger is thrown out and comes back."""
        size = self._case.block_size
        pair = [prompt[: len(prompt) // size * size - 1] for prompt in self._prompts.prompts[:2]]
        cold = {prompt: cold_run(self._shards, prompt, self._prompts.new_tokens) for prompt in pair}
        replica = self._replica(sum(-(-len(prompt) // size) for prompt in pair))
        streams = self._apart(replica, pair)
        return self._found("preempted", replica, streams, ("preempted",), ["alone-0", "alone-1"], cold)

    def _replica(
        self,
        num_blocks: int,
        chunk_tokens: int = 512,
        step_tokens: int = 512,
        shared_prefix: SharedPrefix = "off",
    ) -> InProcessReplica:
        shape = ReplicaShape(
            num_blocks,
            self._case.block_size,
            chunk_tokens=chunk_tokens,
            step_tokens=step_tokens,
            shared_prefix=shared_prefix,
            other_block_sizes=self._case.other_block_sizes,
        )
        return InProcessReplica(self._shards, shape)

    def _each_group(self, count: str) -> tuple[str, ...]:
        """The count's name for the first cache group and, where there are others, for the second."""
        return (count, f"other_{count}") if self._case.other_block_sizes else (count,)

    def _room(self, requests: int) -> int:
        return requests * -(-self._prompts.longest // self._case.block_size)

    def _apart(
        self, replica: InProcessReplica, prompts: Sequence[Prompt] = ()
    ) -> list[tuple[Prompt, InProcessStream]]:
        served = prompts or self._prompts.prompts
        streams = [
            (prompt, replica.submit(prompt, f"alone-{number}", self._prompts.new_tokens))
            for number, prompt in enumerate(served)
        ]
        replica.run()
        return streams

    def _found(
        self,
        kind: str,
        replica: InProcessReplica,
        streams: Sequence[tuple[Prompt, InProcessStream]],
        needed: tuple[str, ...],
        audited: Sequence[str],
        cold: Cold | None = None,
    ) -> RunFound:
        expected = cold or self._cold
        found = [replica.audit(namespace) for namespace in audited]
        highest = replica.largest_value()
        replica.close()
        return RunFound(
            kind,
            tuple(
                Compared(
                    tuple(stream.tokens),
                    tuple(stream.logits),
                    expected[prompt],
                    "" if stream.failure is None else stream.failure.kind,
                )
                for prompt, stream in streams
            ),
            replica.counts,
            needed,
            sum(rows for rows, _ in found),
            max((worst for _, worst in found), default=0.0),
            highest,
        )
