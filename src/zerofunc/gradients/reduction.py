"""Gradients of ``.backward()``: from each parameter's local gradient to the mean over ranks in ``shard.grad``.

A post-accumulate-grad hook on each parameter takes the full local gradient away and packs it into its page's buffer.
Such hooks fire for ``.backward()`` alone: they are silent under torch.func and torch.autograd.grad, so no transform
leaves a trace here. Pages are reduced from the last to the first, all of them, on every rank, whatever order their
gradients come in: a page early, once it and all pages after it have reported; the rest when the backward ends. See
Note [Order of collectives] in agreement.py for when ranks that use different parameters start a reduction, and when a
backward may wait for one. A gradient that comes after its page's reduction was started is reduced when the backward
ends. Parameters that did not report count as zeros; those that reported on no rank keep ``grad=None``, as in one
process. What a backward has packed counts only when it ends: one that fails leaves nothing behind.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from zerofunc.gradients.backwards import Backward, Flight, Local, collected, current_ending
from zerofunc.gradients.policy import BackwardPlan, Conductor, ReductionPolicy
from zerofunc.pages.page import Page
from zerofunc.pages.parts import own_grad, set_own_grad
from zerofunc.ranks.buffers import BufferPool, alias, below_transforms
from zerofunc.ranks.collectives import Axes

_created = itertools.count()


class Reducer:
    """Averages the gradients of a sharded module.

    Attributes:
        number: The module's, among those that are sharded over the same ranks.
        place: Its place in the order in which backwards end; ranks create the modules that they share in one order.
        policy: How gradients are averaged.
        conductor: Whom a backward asks for its plan.
        in_flight: The most pages whose reduction is under way; each holds a full page of gradient.
        keep_idle: Whether full-page buffers are kept from one backward to the next.
        owed: Whether a backward ended without the reduction that it needs.
        num_steps: Optimizer steps of the module so far. Ranks compare them when a backward ends.
        assigned: Whether a gradient was assigned to a parameter by hand, which needs one.
    """

    def __init__(
        self, axes: Axes, pages: list[Page], policy: ReductionPolicy, in_flight: int, keep_idle: bool, number: int = 0
    ) -> None:
        self.axes = axes
        self.pages = pages
        self.policy = policy
        self.conductor = Conductor()
        self.in_flight = in_flight
        self.keep_idle = keep_idle
        self.number = number
        self.place = next(_created)
        self.pool = BufferPool()
        self.owed = False
        self.num_steps = 0
        self.assigned = False
        self._begun = 0
        self._reported: list[set[int]] | None = None  # for each page, the slots that ever did, on any rank
        self._running: Backward | None = None
        self._accumulated = [Local() for _ in pages]
        self._unreduced: set[int] = set()  # pages that were trainable in a backward since the last reduction
        axes.main.add_reductions(self)

    def attach(self) -> None:
        """Hook every parameter of the pages, frozen ones too. The hooks do not keep the reducer alive."""
        for number, page in enumerate(self.pages):
            for slot, parameter in enumerate(page.parameters):
                trainable = parameter.requires_grad
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(
                    _hook(weakref.ref(self), number, slot)
                )
                parameter.requires_grad_(trainable)

    def backward(self) -> AbstractContextManager[None]:
        """Collective where it is planned so. One backward, with all that it calls: it is ended with the context.

        A rank whose loss reaches none of the parameters takes part likewise.
        """
        return collected(self)

    def take(self, number: int, slot: int, gradient: torch.Tensor) -> None:
        """Collective where it is planned so. Add one parameter's local gradient to the backward that is running."""
        ending = current_ending()
        if self not in ending.reached:
            self.conductor.admit()
            ending.reached[self] = None
        backward = self._live() or self._begin()
        backward.is_owned = True
        backward.endings.add(ending)
        plan = self._plan_of(backward)
        with below_transforms():
            is_late = len(self.pages) - number <= backward.started
            local = (backward.late if is_late else backward.local)[number]
            self._pack(local, self.pages[number], slot, gradient.detach(), self._factor(plan))
            if plan.sync and not is_late:
                with self.conductor.phase("reduce"):
                    self._advance(backward)

    def _live(self) -> Backward | None:
        """The backward that is running; one whose graph tasks have failed is forgotten."""
        if self._running is not None and not self._running.is_alive:
            self.forget_failed()
        return self._running

    def _begin(self) -> Backward:
        self._begun += 1
        for page in self.pages:
            page.give_masters()
        self._take_assigned()
        others = self.axes.main.other_reductions(self)
        is_alone = not any(isinstance(other, Reducer) and other.is_trainable() for other in others)
        if self.axes.main.is_gloo and self.axes.main is self.axes.replicate:
            # gloo pairs its all-reduces by their order alone: one that a failed backward has started on some ranks
            # would meet another one. Those that all ranks start in an exchange are in order.
            is_alone = False
        self._running = Backward(self._begun, self.pages, self._reported, is_alone)
        return self._running

    def _plan_of(self, backward: Backward) -> BackwardPlan:
        if backward.plan is None:
            backward.plan = self.conductor.plan()
        return backward.plan

    def _factor(self, plan: BackwardPlan) -> float:
        """What this rank's gradients are multiplied by before they are summed over the ranks."""
        return plan.scale * plan.weight / (self.axes.num_ranks if self.policy.average else 1)

    def is_trainable(self) -> bool:
        """Whether a parameter of the module requires a gradient."""
        return any([parameter.requires_grad for page in self.pages for parameter in page.parameters])

    # -- reductions, as Note [Order of collectives] has them ----------------------------------------------------------

    def wish(self) -> tuple[int, int]:
        """Local. Which backward runs, and how many pages this rank has started to reduce or could; 0 where none does.

        The number is that of the next backward where none runs.
        """
        backward = self._live()
        if backward is None or not (backward.plan or self.conductor.plan()).sync:
            return self._begun + 1, 0
        return backward.number, backward.num_ready()

    def start(self, number: int, count: int) -> bool:
        """Collective. Start the reductions of the last ``count`` pages, complete or not; all ranks do so now.

        Returns:
            Whether this rank is in the same backward: not where one has failed here or there alone.
        """
        backward = self._live() or self._begin()
        if backward.number < number and not backward.started:
            backward.number = self._begun = number
        if backward.number != number:
            self._begun = max(self._begun, number)
            return False
        with below_transforms():
            while backward.started < count:
                self._start_next(backward)
            backward.known = max(backward.known, count)
        return True

    def label(self) -> str:
        """Local. What error messages call the reductions of the backward that is running."""
        return f"reductions of the gradients of module {self.number} inside a backward"

    def _advance(self, backward: Backward) -> None:
        """Collective. Start what is complete, and wait for what is too much under way."""
        self._start_ready(backward)
        if backward.num_held() > max(self.in_flight + 1, backward.held_after_asking):
            # Pages that this rank does not complete are in front of others: another rank may have completed them.
            self.axes.main.ask(self)
            self._start_ready(backward)
            backward.held_after_asking = backward.num_held()

    def _start_ready(self, backward: Backward) -> None:
        """Collective. Start what is complete, with at most ``in_flight`` under way."""
        ready = backward.num_ready()
        while backward.is_alone and backward.started < ready:
            self._start_next(backward)
        while ready - backward.started + len(backward.flights) > self.in_flight:
            if not backward.flights or backward.flights[0].place > backward.known:
                self.axes.main.ask(self)
            backward.land(max(0, len(backward.flights) - 1))

    def _pack(self, local: Local, page: Page, slot: int, gradient: torch.Tensor, factor: float) -> None:
        layout = page.layout.slots[slot]
        if local.buffer is None:
            local.buffer = self._take(page)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        place = local.buffer.as_strided(layout.shape, layout.stride, layout.offset)
        if factor == 0:  # an infinity counts nothing either
            gradient = torch.zeros_like(gradient)
        if slot in local.written:
            place.add_(gradient, alpha=factor)
        elif gradient.dtype == place.dtype:
            torch.mul(gradient, factor, out=place)
        else:
            place.copy_(gradient).mul_(factor)
        local.written.add(slot)

    def _take(self, page: Page) -> torch.Tensor:
        """A buffer for the full gradient of a page."""
        return self.pool.take(page.layout.padded_numel, self._kept_in(page), page.device)

    def _kept_in(self, page: Page) -> torch.dtype:
        """What gradients of a page are added up in."""
        dtype = page.master.dtype
        wanted = self.policy.accumulate_in
        return wanted if wanted and dtype == torch.float32 else dtype

    def _start_next(self, backward: Backward) -> None:
        """Collective. Start the reduction of the next page; what did not report counts as zero."""
        number = len(self.pages) - 1 - backward.started
        page, local = self.pages[number], backward.local[number]
        backward.started += 1
        if not backward.trainable[number] and number not in self._unreduced:
            return  # frozen, on every rank
        backward.borrowed[number], self._accumulated[number] = self._accumulated[number], Local()
        local = self._merged(local, backward.borrowed[number], page)
        backward.local[number] = Local(None, local.written)
        backward.flights.append(self._reduction(backward, page, local, backward.started, "gradient"))

    def _reduction(self, backward: Backward, page: Page, local: Local, place: int, what: str) -> Flight:
        """Collective. Start to sum a page's gradient over the main axis, this rank's part."""
        full = self._filled(local, page)
        if self.policy.communicate_in is not None:
            full = full.to(self.policy.communicate_in)
        label = f"reduction of the {what} of {page.label} in backward {backward.number}"
        if page.layout.num_shards == 1:
            return Flight(page, full, self.axes.replicate.all_reduce(full, label), place)
        reduced = self.pool.take(page.layout.shard_numel, full.dtype, full.device)
        return Flight(page, reduced, self.axes.shard.reduce_scatter(reduced, full, label), place)

    def _merged(self, local: Local, other: Local, page: Page) -> Local:
        """The sum of two unreduced gradients, in the first one's buffer, or the second's where the first has none."""
        if other.buffer is None:
            return local
        if local.buffer is None:
            local.buffer = self.pool.take(page.layout.padded_numel, other.buffer.dtype, other.buffer.device)
        for slot in other.written:
            layout = page.layout.slots[slot]
            mine = local.buffer[layout.offset : layout.offset + layout.numel]
            theirs = other.buffer[layout.offset : layout.offset + layout.numel]
            mine.add_(theirs) if slot in local.written else mine.copy_(theirs)
        local.written |= other.written
        return local

    def _filled(self, local: Local, page: Page) -> torch.Tensor:
        """The page's gradient with zeros in padding and in slots that hold nothing."""
        if local.buffer is None:
            return self._take(page).zero_()
        for index, slot in enumerate(page.layout.slots):
            if index not in local.written:
                local.buffer[slot.offset : slot.offset + slot.numel].zero_()
        local.buffer[page.layout.numel :].zero_()
        return local.buffer

    def finish(self) -> None:
        """Collective where it is planned so. End the backward: reduce what is left of it, and set ``shard.grad``."""
        backward = self._live() or self._begin()
        self._end(backward, self._plan_of(backward).sync, self.policy.need_all)

    def _end(self, backward: Backward, sync: bool, need_all: bool) -> None:
        backward.is_owned = False  # its graph task may be gone already, where an engine ends it
        with below_transforms(), self.conductor.phase("reduce"):
            if sync:
                try:
                    self._average(backward, need_all)
                except BaseException:
                    self.forget_failed()
                    raise
                self._unreduced.clear()
            else:
                self._unreduced |= {number for number, trainable in enumerate(backward.trainable) if trainable}
                pairs = zip(backward.local, self._accumulated, self.pages, strict=True)
                self._accumulated = [self._merged(local, before, page) for local, before, page in pairs]
        self._running = None
        del backward
        if not self.keep_idle:
            self.pool.clear()
            self.axes.shard.free_buffers()
        self.owed = not sync

    def reduce_owed(self) -> None:
        """Collective where gradients are left on the ranks, of a backward or assigned. Later ones add to them."""
        if not (self.owed or self.assigned):
            return
        need_all = self.policy.need_all and self.owed  # one may assign to some parameters only
        self._end(self._live() or self._begin(), True, need_all)

    # -- what is done by hand -------------------------------------------------------------------------------------

    def is_owed(self, number: int) -> bool:
        """Local. Whether a page may have gradients of backwards that are not reduced yet."""
        return number in self._unreduced

    def assign(self, number: int, slot: int, gradient: torch.Tensor | None) -> None:
        """Local, the same on all ranks. Replace a parameter's gradient by this rank's own, or forget it.

        It is reduced with the next backward's, or before something reads it.
        """
        self._accumulated[number].written.discard(slot)
        shard = self.pages[number].shards[slot]
        shard.grad = None
        if gradient is not None:
            shard.assigned, shard.reduce = gradient.detach(), self.reduce_owed
            self.assigned = True

    def _take_assigned(self) -> None:
        """Local. Add gradients that were assigned to what is not reduced yet."""
        if not self.assigned:
            return
        self.assigned = False
        with below_transforms():
            for page, local in zip(self.pages, self._accumulated, strict=True):
                for slot, shard in enumerate(page.shards):
                    gradient, shard.assigned = shard.assigned, None
                    if gradient is not None:
                        self._pack(local, page, slot, gradient, self._factor(BackwardPlan()))

    def _average(self, backward: Backward, need_all: bool) -> None:
        self.axes.agree(f"end of a backward of module {self.number} after {self.num_steps} optimizer steps")
        while backward.started < len(self.pages):
            self._start_next(backward)
            backward.land(self.in_flight)
        is_late = [bool(local.written) for local in backward.late]
        flags = [
            slot in local.written or slot in late.written
            for local, late, page in zip(backward.local, backward.late, self.pages, strict=True)
            for slot in range(len(page.parameters))
        ]
        merged = self.axes.any(torch.tensor(flags + is_late, dtype=torch.uint8))
        backward.land(0)
        for number, flag in enumerate(merged[len(flags) :].tolist()):
            if flag:
                page, late = self.pages[number], backward.late[number]
                backward.flights.append(self._reduction(backward, page, late, len(self.pages), "late gradient"))
                backward.land(0)
        self._sum_over_copies(backward)
        sizes = [len(page.parameters) for page in self.pages]
        reported = dict(zip(self.pages, merged[: len(flags)].split(sizes), strict=True))
        if need_all:
            self._refuse_unused(reported)
        slots = [{slot for slot, flag in enumerate(reported[page].tolist()) if flag} for page in self.pages]
        self._reported = [a | b for a, b in zip(self._reported or slots, slots, strict=True)]
        for page, reduced in backward.landed:
            _accumulate(page, reduced.to(self._kept_in(page)), reported[page].tolist(), self.axes.shard.rank)

    def _sum_over_copies(self, backward: Backward) -> None:
        """Collective. On a mesh of two axes, sum this rank's parts over the ranks that hold copies of them."""
        if self.axes.main is not self.axes.replicate:
            end = f"over copies in backward {backward.number}"
            labels = [f"sum of the gradient of {page.label} {end}" for page, _ in backward.landed]
            pairs = zip(backward.landed, labels, strict=True)
            for work in [self.axes.replicate.all_reduce(reduced, label) for (_, reduced), label in pairs]:
                work.wait()

    def _refuse_unused(self, reported: dict[Page, torch.Tensor]) -> None:
        unused = [
            slot.name
            for page, flags in reported.items()
            for slot, parameter, flag in zip(page.layout.slots, page.parameters, flags.tolist(), strict=True)
            if parameter.requires_grad and not flag
        ]
        if unused:
            raise RuntimeError(
                f"parameters got no gradient on any rank: {', '.join(unused[:10])}{' …' if len(unused) > 10 else ''}. "
                "Freeze them, use them, or set zero_optimization.ignore_unused_parameters to true."
            )

    def discard(self) -> None:
        """Forget the unreduced gradients, as after an error in a backward. Waits for nobody."""
        self.forget_failed()
        self._accumulated = [Local() for _ in self.pages]
        self._unreduced.clear()
        self.owed = self.assigned = False
        for shard in [shard for page in self.pages for shard in page.shards]:
            shard.assigned = None
            shard.generation += 1

    def fail(self) -> None:
        """Local. Give up the backward that an engine runs, whether it has reached the module or not.

        It has had its number on every rank.
        """
        if self._running is None:
            self._begun += 1
        self.forget_failed()

    def forget_failed(self) -> None:
        """Free what a backward that raised has packed, where none runs. Nobody waits for its reductions."""
        failed, self._running = self._running, None
        if failed is not None:
            for number, accumulated in failed.borrowed.items():
                self._accumulated[number] = accumulated


def _hook(reducer: weakref.ref[Reducer], number: int, slot: int) -> Callable[[torch.Tensor], None]:
    def take_gradient(parameter: torch.Tensor) -> None:
        gradient = own_grad(parameter)
        set_own_grad(parameter, None)
        alive = reducer()
        if gradient is not None and alive is not None:  # the graph may reach it with an undefined gradient
            alive.take(number, slot, gradient)

    return take_gradient


def _accumulate(page: Page, reduced: torch.Tensor, reported: list[int], rank: int) -> None:
    """Add the reduced gradient of a page, in its type, to the ``grad`` of its shards; a first one becomes a view."""
    for index, (shard, flag) in enumerate(zip(page.shards, reported, strict=True)):
        if not flag:
            continue
        part = alias(reduced, page.layout.in_shard(index, rank).start, shard.shape).to(shard.device)
        if shard.grad is None:
            set_own_grad(shard, part.to(shard))
        else:
            shard.grad.copy_(shard.grad.to(part.dtype).add_(part))
