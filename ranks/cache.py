"""Who owns which KV block and which state slot. Numbers only: the tensors are arch.caches'."""

from __future__ import annotations

from collections.abc import Iterable

# Tokens a KV block holds.
BLOCK_SIZE = 16


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` tokens fill."""
    return -(-tokens // BLOCK_SIZE)


class Pool:
    """Numbers 1 ... `total`, each free or owned; 0 is the sink and never handed out.

    The number freed last is taken first, while its memory may still be in a cache. Freeing a number that
    is not owned is our own mistake and raises.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._owned: set[int] = set()

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> int:
        """Takes one; the caller has looked at `free` before."""
        number = self._free.pop()
        self._owned.add(number)
        return number

    def take_many(self, count: int) -> list[int]:
        """Takes `count`; the caller has looked at `free` before."""
        return [self.take() for _ in range(count)]

    def give_back(self, numbers: Iterable[int]) -> None:
        """Frees what was taken."""
        for number in numbers:
            if number not in self._owned:
                raise ValueError(f"{number} is freed but nobody owns it")
            self._owned.remove(number)
            self._free.append(number)
