"""How ranks agree on what comes next, and how they notice that they run different programs.

Note [Order of collectives]. Gathers, reductions and everything else that ranks do together have one order, the same on
all of them. Before each such operation ranks exchange a *header*: what they are about to do, and how far the
reductions of a running backward have come. This exchange is the only place where a rank waits for another one whose
position it does not know, and who waits there helps:

- Every rank starts, in the exchange, the reductions of pages that another rank has started or needs started, whether
  its own gradients are complete or not. (What comes for them later is reduced at the end of the backward.)
- A rank whose backward has too many reductions under way *asks* in an exchange of its own. The others, whatever they
  were about to do, start those reductions and repeat their own header. Afterwards all ranks have started them, so that
  waiting for them cannot close a circle.
- So does a rank that holds too many full gradients, because a page which it does not complete is in front of others.

So no backward ever waits for something that another rank starts later, whichever parameters each rank uses, and ranks
that have diverged see different headers: they raise :class:`DivergenceError` with every rank's own words.

Between exchanges a rank starts a page by itself where nothing can come between: one module alone is trained, and
messages are paired by a label of their own (not gloo's all-reduces at stage 0, which are paired by their order).
Backwards end in the order in which modules were sharded, not in that in which a rank has reached them. What a graph
task has brought is ended with it; what an engine's backward has brought, inner backwards and other engines' modules
included, with that. Every end has a number, so that what a failed backward has sent meets nothing of a later one.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # which it does not export to type checkers

GRACE_S = 2.0
"""Seconds that a rank whose wait has failed gives the others to say what they wait for."""


class DivergenceError(RuntimeError):
    """Ranks ran different programs, or one of them is gone: the message says what each waited for."""


class Reductions(Protocol):
    """The reductions of one module's running backward, in the order that all ranks follow."""

    number: int

    def wish(self) -> tuple[int, int]:
        """Local. Which backward runs, and how many reductions this rank has started or could; 0 where none runs."""

    def start(self, number: int, count: int) -> bool:
        """Collective. Start them up to the ``count``-th; all ranks do so now. Whether this rank is in that backward."""

    def label(self) -> str:
        """Local. What error messages call them."""


class Channel:
    """Where the ranks of one axis agree, over a gloo group of its own.

    Attributes:
        group: That group.
        ranks: Its ranks' numbers among all.
        size: How many they are.
        rank: This process's place among them.
        timeout_s: Seconds after which a rank that waits alone raises.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], timeout_s: float, store: Store) -> None:
        self.group = group
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        self.timeout_s = timeout_s
        self._store = PrefixStore("zerofunc/waits", store)  # of all groups: ranks may wait on different ones
        self._mine = torch.zeros(5, dtype=torch.int64)
        self._all = torch.zeros(self.size * 5, dtype=torch.int64)
        self._numbers = itertools.count()
        self._reductions: WeakValueDictionary[int, Reductions] = WeakValueDictionary()

    def next_number(self) -> int:
        """Local, the same on all ranks. A number for another module that is sharded over these ranks."""
        return next(self._numbers)

    def add(self, reductions: Reductions) -> None:
        """Local. From now on headers speak of these reductions as well."""
        self._reductions[reductions.number] = reductions

    def others(self, reductions: Reductions) -> list[Reductions]:
        """Local. Those of other modules."""
        return [other for other in self._reductions.values() if other is not reductions]

    def agree(self, label: str) -> None:
        """Collective. Check that every rank is about to do what ``label`` says; help those that need reductions.

        Raises:
            DivergenceError: On every rank that still runs, with each rank's label, when they differ or when a rank
                does not arrive within the time-out.
        """
        while True:
            rows = self._exchange(label, is_asking=False)
            if not any(is_asking for _, is_asking, *_ in rows):
                break
        if len({digest for digest, *_ in rows}) > 1:
            raise self._diverged(label)

    def ask(self, reductions: Reductions) -> None:
        """Collective. Have all ranks start these reductions, as many as this rank wishes."""
        self._exchange(reductions.label(), is_asking=True, of=reductions)

    def _exchange(self, label: str, is_asking: bool, of: Reductions | None = None) -> list[list[int]]:
        """Collective. All ranks' headers, the reductions that they speak of having been started on this rank too."""
        candidates = [of] if of is not None else list(self._reductions.values())
        wishes = [(*r.wish(), r.number) for r in candidates]
        backward, count, number = max(wishes, key=lambda wish: wish[1], default=(0, 0, 0))
        self._mine.copy_(torch.tensor((zlib.crc32(label.encode()), is_asking, number, backward, count)))
        try:
            all_gather(self._all, self._mine, group=self.group, async_op=False)
        except RuntimeError as error:
            raise self.lost(label, error) from error
        rows = self._all.view(self.size, 5).tolist()
        wished: dict[int, list[tuple[int, int]]] = {}
        for _, _, number, backward, count in rows:
            if count:
                wished.setdefault(number, []).append((backward, count))
        for number in sorted(wished):
            reductions = self._reductions.get(number)  # where it is gone, the next labels differ: they name the module
            is_there = reductions is None or reductions.start(*max(wished[number]))
            if not is_there or len({backward for backward, _ in wished[number]}) > 1:
                raise DivergenceError(
                    f"rank {self.rank} of {self.size} came to {label}, and ranks are in different backwards of module "
                    f"{number}: one has failed on some ranks alone. Let a backward fail on all ranks or none."
                )
        return rows

    # -- errors -------------------------------------------------------------------------------------------------------

    def _diverged(self, label: str) -> DivergenceError:
        labels: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(labels, label, group=self.group)
        except RuntimeError as error:
            return self.lost(label, error)
        texts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(labels))
        return DivergenceError(
            f"ranks run different programs. {texts}. Every rank must call the same parts of a sharded model in the "
            "same order: run the branch on all ranks, keep its parameters on one page (unsplit) or gathered "
            "(zerofunc.gathered), and loop over zerofunc.join(engine, loader) where ranks have different numbers of "
            "batches."
        )

    def lost(self, label: str, error: Exception) -> DivergenceError:
        """The error to raise when a rank did not take part in ``label``, with what the others say that they wait for.

        Waits a short while for the others, whose waits fail at about the same time.
        """
        heard = "; ".join(f"rank {rank}: {text}" for rank, text in self._waits(label).items())
        return DivergenceError(
            f"rank {self.rank} of {self.size} waited at {label}, and another rank did not come within "
            f"{self.timeout_s:g} s or has ended ({str(error).splitlines()[0][:200]}). {heard}. If it ran out of "
            "batches, loop over zerofunc.join(engine, loader); if it took another branch, run that inside "
            "zerofunc.gathered(module)."
        )

    def _waits(self, label: str) -> dict[int, str]:
        """What each other rank waits for, or has waited for before it gave up."""
        found = dict.fromkeys((rank for rank in range(self.size) if rank != self.rank), "not waiting, or ended")
        # In a thread, because a store whose host is gone answers after minutes.
        listener = threading.Thread(target=self._listen, args=(label, found), daemon=True)
        listener.start()
        listener.join(GRACE_S + 1)
        return dict(found)

    def _listen(self, label: str, found: dict[int, str]) -> None:
        """Write into the ranks' store what this rank waits for, and read into ``found`` what the others do."""
        try:
            self._store.set(str(self.ranks[self.rank]), f"{time.time()} {label}")
            end, silent = time.monotonic() + GRACE_S, set(found)
            while silent and time.monotonic() < end:
                for rank in [rank for rank in silent if self._store.check([str(self.ranks[rank])])]:
                    moment, _, text = self._store.get(str(self.ranks[rank])).decode().partition(" ")
                    age_s = max(0.0, time.time() - float(moment))
                    if age_s < self.timeout_s + GRACE_S:  # otherwise it is of an earlier failure
                        found[rank] = text if age_s < 2 * GRACE_S else f"{text}, until {age_s:.0f} s ago"
                        silent.remove(rank)
                time.sleep(0.02)
        except RuntimeError:  # the store ended with the rank that held it
            found.update(dict.fromkeys(found, "unknown, as the ranks' store is gone"))


def all_gather(full: torch.Tensor, shard: torch.Tensor, *, group: dist.ProcessGroup | None, async_op: bool) -> Any:
    """Collective. ``torch.distributed``'s gather into one tensor, by the name that this version has."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return gather(full, shard, group=group, async_op=async_op)
