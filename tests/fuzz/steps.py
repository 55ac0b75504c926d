"""The steps of a program: what each does to the sharded model and to plain PyTorch, as text."""

from dataclasses import dataclass, replace

from fuzz import chains


@dataclass(frozen=True)
class Surroundings:
    """What the text of a step depends on besides itself.

    `branch` is what a network that branches is told: "r", its rank, or the number of the step, or nothing. `boundary`
    says whether a micro-step ends the accumulation.
    """

    engine: bool
    accumulation: int
    clip: bool
    branch: str
    boundary: bool = True

    @property
    def call(self):
        return f"(lambda a: m(a, {self.branch}))" if self.branch else "m"

    @property
    def more(self):
        """A further argument of the network."""
        return f", {self.branch}" if self.branch else ""


class Step:
    """What a program is made of: `lines` are its text, `simpler` gives steps to try in its place."""

    def lines(self, number, around):
        raise NotImplementedError

    def simpler(self):
        """Its modes and transforms left out, one at a time."""
        if getattr(self, "mode", ""):
            yield replace(self, mode="")


MODES = {
    "no_grad": "torch.no_grad()",
    "inference_mode": "torch.inference_mode()",
    "gathered": "zerofunc.gathered(module)",
    "second_order": "zerofunc.second_order()",
}
OURS_ALONE = ("gathered", "second_order")
CLEAR = {
    "optimizer": "for o in {optimizers}: o.zero_grad()",
    "module": "{module}.zero_grad()",
    "parameters": "for p in {module}.parameters(): p.grad = None",
}
WRITES = {
    "scale": "lambda p: p.mul_(1.1)",
    "add": "lambda p: p.add_(0.1)",
    "fill": "lambda p: nn.init.constant_(p, 0.3)",
    "copy": "lambda p: p.copy_(p.sin())",
    "view": "lambda p: p.view(-1)[:3].zero_()",
    "none": "lambda p: p",
}
COPIES = {
    "deepcopy": "values(copy.deepcopy({module}))",
    "twin": "(lambda m: grad(lambda a: m(a{more}).square().sum())(data({number}, r)))(copy.deepcopy({module}))",
    "state_dict": "{{n: t.clone() for n, t in {module}.state_dict().items()}}",
    "saved": "saved({module}.state_dict())",
    "pickled": "pickle.loads(pickle.dumps(dict({module}.state_dict())))",
    "reload": "{module}.load_state_dict({{n: t * 0.9 for n, t in {module}.state_dict().items()}}) and None",
    "optimizer": "[o.load_state_dict(copy.deepcopy(o.state_dict())) for o in {optimizers}]",
}


def _compare(label, ours, plain, mode="", changes=False, with_types=True):
    """The line that runs both sides."""
    sides = []
    for side, is_ours in ((ours, True), (plain, False)):
        enters = mode and (is_ours or mode not in OURS_ALONE)
        sides.append(f"lambda: under({MODES[mode]}, lambda: {side})" if enters else f"lambda: {side}")
    options = f"{', changes=True' if changes else ''}{'' if with_types else ', with_types=False'}"
    return f"both({label!r}, {sides[0]}, {sides[1]}, T{options})"


def _without_one(items):
    return [items[:i] + items[i + 1 :] for i in range(len(items))]


@dataclass(frozen=True)
class Inputs(Step):
    """A derivative over a rank's inputs."""

    chain: tuple[str, ...]
    mode: str = ""

    def simpler(self):
        yield from super().simpler()
        if len(self.chain) > 1:
            yield from (replace(self, chain=rest) for rest in _without_one(self.chain))

    def lines(self, number, around):
        return [
            f"def f(m, r): return ({chains.over_inputs(self.chain, around.call)})(data({number}, r))",
            _compare(
                f"{number} {' of '.join(self.chain[::-1])} {self.mode}", "f(model, RANK)", "f(plain, RANK)", self.mode
            ),
        ]


@dataclass(frozen=True)
class Parameters(Step):
    """A derivative over the full parameters, of a rank's own."""

    kind: str
    mode: str = ""

    def lines(self, number, around):
        return [
            "def f(m, r):",
            f"    x, p = data({number}, r), dict(m.named_parameters())",
            f"    c = lambda p, a: functional_call(m, p, (a{around.more or ','}))",
            "    L = lambda p: c(p, x).square().mean()",
            f"    return {chains.OVER_PARAMETERS[self.kind]}",
            _compare(f"{number} parameters: {self.kind} {self.mode}", "f(module, RANK)", "f(plain, RANK)", self.mode),
        ]


@dataclass(frozen=True)
class Shards(Step):
    """A derivative over shards, of the mean loss over all ranks."""

    kind: str
    mode: str = ""

    def lines(self, number, around):
        return [
            f"def f(L, s, v): return {chains.OVER_SHARDS[self.kind]}",
            f"def loss(c, r): return c(data({number}, r){around.more}).square().mean()",
            f"v = zerofunc.draw(module, {number})",
            "w = zerofunc.unshard(module, v)",
            _compare(
                f"{number} shards: {self.kind} {self.mode}",
                "over_shards(f, loss, module, v)",
                "over_parameters(f, loss, plain, w)",
                self.mode,
                with_types=False,  # shards are float32 where parameters are of fewer bits
            ),
        ]


@dataclass(frozen=True)
class Train(Step):
    """A loss, with penalties of derivatives, its backward, and maybe an optimizer's step.

    `how`: "twice" is two backwards of two graphs, "retained" two of one, "forwards" two forwards and one backward.
    """

    penalties: tuple[tuple[str, ...], ...] = ()
    how: str = "once"
    mode: str = ""
    applies: bool = True
    clears: str = "optimizer"

    def simpler(self):
        yield from super().simpler()
        yield from (replace(self, penalties=rest) for rest in _without_one(self.penalties))
        for i, chain in enumerate(self.penalties):
            for rest in _without_one(chain) if len(chain) > 1 else ():
                yield replace(self, penalties=(*self.penalties[:i], rest, *self.penalties[i + 1 :]))
        for name, value in (("how", "once"), ("applies", False), ("clears", "optimizer")):
            if getattr(self, name) != value:
                yield replace(self, **{name: value})

    def lines(self, number, around):
        call = around.call
        terms = [f"({chains.over_inputs(chain, call)})(x).square().mean()" for chain in self.penalties]
        terms += [f"{call}(x.sin()).mean()"] if self.how == "forwards" else []
        lines = [
            "def loss(m, r):",
            f"    x = data({number}, r)",
            f"    return {' + 0.1 * '.join([f'{call}(x).square().mean()', *terms])}",
        ]
        label = f"{number} backward of {self.penalties} {self.how} {self.mode}"
        lines.append(f"if {_compare(label, *self._backwards(around), self.mode, True)} != 'equal': clear()")
        if around.engine:
            return lines + self._micro_step(number, around)
        lines.append(
            _compare(f"{number} gradients", "zerofunc.full_gradients(module)", "gradients(plain)", with_types=False)
        )
        return lines + (self._step(number, around) if self.applies else [])

    def _backwards(self, around):
        share = f" / {around.accumulation}" if around.engine else ""
        if self.how == "retained":
            backward = "engine.backward" if around.engine else "torch.Tensor.backward"
            plain = f"twice(mean(loss, plain){share}, torch.Tensor.backward)"
            return f"twice(loss(model, RANK), {backward})", plain
        ours = "[engine.backward(loss(model, RANK))] and None" if around.engine else "loss(model, RANK).backward()"
        plain = f"(mean(loss, plain){share}).backward()"
        return (f"[{ours}, {ours}]", f"[{plain}, {plain}]") if self.how == "twice" else (ours, plain)

    def _micro_step(self, number, around):
        step = f"step(plain_optimizers, {'plain' if around.clip else None})" if around.boundary else "None"
        clear = ["for o in plain_optimizers: o.zero_grad()"] if around.boundary else []
        return [_compare(f"{number} step", "engine.step()", step, changes=True), *clear, *_parameters(number)]

    def _step(self, number, around):
        ours = ["zerofunc.clip_grad_norm_(module, 0.5)"] if around.clip else []
        ours += ["step(optimizers)"]
        lines = [
            _compare(
                f"{number} step",
                f"[{', '.join(ours)}] and None",
                f"step(plain_optimizers, {'plain' if around.clip else None})",
                changes=True,
            ),
            *_parameters(number),
        ]
        return lines + (Clear(self.clears).lines(number, around) if self.clears else [])


def _parameters(number):
    return [
        _compare(f"{number} parameters", "values(module)", "values(plain)"),
        _compare(
            f"{number} shards",
            "zerofunc.unshard(module, zerofunc.shards(module, frozen=True))",
            "values(plain)",
            with_types=False,
        ),
    ]


@dataclass(frozen=True)
class Clear(Step):
    """Gradients are cleared, by one of the ways there are."""

    side: str

    def lines(self, number, around):
        text = CLEAR[self.side]
        return [
            text.format(module="module", optimizers="optimizers"),
            text.format(module="plain", optimizers="plain_optimizers"),
        ]


@dataclass(frozen=True)
class Freeze(Step):
    """A parameter is frozen or thawed, between steps."""

    index: int
    thaws: bool

    def lines(self, number, around):
        return [
            "clear()",
            *(f"pick({side}, {self.index}).requires_grad_({self.thaws})" for side in ("module", "plain")),
        ]


@dataclass(frozen=True)
class Hook(Step):
    """A hook on a parameter that is sharded already."""

    index: int

    def lines(self, number, around):
        hook = f"pick({{}}, {self.index}).register_hook(lambda g: g * 0.5) and None"
        return [_compare(f"{number} hook", hook.format("module"), hook.format("plain"))]


@dataclass(frozen=True)
class Write(Step):
    """An in-place write into a parameter on all ranks, into all of them on the first, or into shards."""

    how: str
    where: str
    index: int

    def lines(self, number, around):
        is_by_place = self.where == "shards" and self.how == "view"  # a shard begins elsewhere on each rank
        how = "lambda p: p.zero_()" if is_by_place else WRITES[self.how]
        plain = f"write({'plain.parameters()' if self.where != 'parameter' else f'[pick(plain, {self.index})]'}, {how})"
        if self.where == "gathered":
            inner = f"write(module.parameters(), {how}) if RANK == 0 else None"
            ours = f"under(zerofunc.gathered(module, write=True), lambda: {inner})"
        elif self.where == "shards":
            ours = f"[write(zerofunc.shards(module, frozen=True).values(), {how}), zerofunc.refresh(module)] and None"
        else:
            ours = f"write([pick(module, {self.index})], {how})"
        return [_compare(f"{number} write", ours, plain, changes=True), *_parameters(number)]


@dataclass(frozen=True)
class Interrupt(Step):
    """An exception in the middle of a forward, or of a backward, that is caught."""

    index: int
    where: str

    def lines(self, number, around):
        block = f"[*{{0}}.children()][{self.index} % len([*{{0}}.children()])], {self.where}"
        ours, plain = "loss(model, RANK)", "mean(loss, plain)"
        ours = f"[engine.backward({ours})] and None" if around.engine else f"{ours}.backward()"
        return [
            f"def loss(m, r): return {around.call}(data({number}, r)).square().mean()",
            _compare(
                f"{number} interrupted",
                f"interrupted({block.format('module')}, lambda: {ours})",
                f"interrupted({block.format('plain')}, lambda: {plain}.backward())",
                changes=True,
            ),
            "clear()",
        ]


@dataclass(frozen=True)
class Copy(Step):
    """A copy of the module or its state, and a state that is loaded."""

    how: str

    def lines(self, number, around):
        sides = [
            COPIES[self.how].format(module=module, optimizers=optimizers, number=number, more=around.more)
            for module, optimizers in (("module", "optimizers"), ("plain", "plain_optimizers"))
        ]
        sides = [side.replace(", r)", ", RANK)") for side in sides]
        return [_compare(f"{number} {self.how}", *sides, changes=self.how == "reload"), *_parameters(number)]


def draw(random):
    """A random step."""
    kind = random.choice(("train",) * 7 + ("inputs",) * 4 + ("parameters",) * 2 + ("shards",) * 2 + ("rare",) * 3)
    if kind == "inputs":
        return Inputs(chains.draw_over_inputs(random, 3), random.choice(("", "", "", *MODES)))
    if kind == "parameters":
        return Parameters(random.choice(list(chains.OVER_PARAMETERS)), random.choice(("", "", "", *MODES)))
    if kind == "shards":
        return Shards(random.choice(list(chains.OVER_SHARDS)), random.choice(("", "", "", *MODES)))
    if kind == "train":
        return _draw_train(random)
    rare = random.choice((Clear, Freeze, Hook, Write, Write, Interrupt, Interrupt, Copy, Copy))
    if rare is Clear:
        return Clear(random.choice(list(CLEAR)))
    if rare is Freeze:
        return Freeze(random.randrange(12), random.random() < 0.5)
    if rare is Hook:
        return Hook(random.randrange(12))
    if rare is Write:
        return Write(
            random.choice(list(WRITES)), random.choice(("gathered", "shards", "parameter")), random.randrange(12)
        )
    if rare is Interrupt:
        return Interrupt(random.randrange(12), random.choice(("fail", "fail_backward")))
    return Copy(random.choice(list(COPIES)))


def _draw_train(random):
    penalties = []
    while random.random() < 0.35:
        penalties.append(chains.draw_over_inputs(random, 2) if random.random() < 0.8 else ("autograd",))
    return Train(
        tuple(penalties),
        random.choice(("once", "once", "once", "twice", "retained", "forwards")),
        random.choice(("", "", "", "gathered", "second_order")),
        random.random() < 0.75,
        random.choice((*CLEAR, "optimizer", "")),
    )
