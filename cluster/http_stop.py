"""Where an answer's text ends: at the first stop string, wherever the borders of tokens and characters fall.

Owns the text that may still become a stop string. Invariant: what is let out depends on the joined text only, not on
its pieces (case B39), and nothing of an excluded stop string is ever let out: text is held back exactly as long as it
could begin one.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Cuts a text at the first stop string to be complete; of those that end together, the longest.

    ``included``: the stop string itself stays in the text.
    """

    def __init__(self, stops: Sequence[str], included: bool) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._included = included
        self._held = ""
        self._matched = False

    @property
    def matched(self) -> bool:
        """Whether the text is over; what is pushed later is dropped."""
        return self._matched

    def push(self, text: str) -> str:
        """The text that is certain now."""
        if self._matched or not self._stops:
            return "" if self._matched else text
        self._held += text
        cut = self._first_match(len(self._held) - len(text))
        if cut is not None:
            start, end = cut
            self._matched = True
            out, self._held = self._held[: end if self._included else start], ""
            return out
        kept = self._could_begin()
        out, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return out

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        out, self._held = self._held, ""
        return out

    def _first_match(self, new_from: int) -> tuple[int, int] | None:
        """[start, end) of the match that ends first; only text from ``new_from`` can end one."""
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            start = self._held.find(stop, max(0, new_from - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _could_begin(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
