"""Random modules: blocks of every kind, shared, tied, frozen, hooked, checkpointed, and the text of their network.

Every block takes (samples, 4) to (samples, 4), so that blocks and transforms nest at will.
"""

from dataclasses import dataclass, replace

# What a block is built by, and where that is a class of its own, the class: its layer, and the forward.
LAYERS = {
    "linear": "nn.Linear(4, 4)",
    "narrow": "nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 4, bias=False))",
    "norm": "nn.LayerNorm(4)",
    "rms": "nn.RMSNorm(4)",
    "group": "nn.GroupNorm(2, 4)",
    "batch": "nn.BatchNorm1d(4).eval()",
    "prelu": "nn.PReLU(4)",
    "weight_norm": "nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
    "old_weight_norm": "nn.utils.weight_norm(nn.Linear(4, 4))",
    "spectral": "nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval()",
    "orthogonal": "nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map='cayley')",
    "shadow": "nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity(), nn.Linear(4, 4)))",
}
CLASSES = {
    "Conv1d": ("nn.Conv1d(1, 2, 3, padding=1)", "m.l(x[:, None]).mean(1)"),
    "Conv2d": ("nn.Conv2d(1, 4, 2)", "m.l(x.view(-1, 1, 2, 2)).flatten(1)"),
    "ConvTranspose": ("nn.ConvTranspose1d(4, 1, 4)", "m.l(x[:, :, None])[:, 0]"),
    "Embedding": ("nn.Embedding(5, 4)", "x + m.l(torch.arange(len(x)) % 5)"),
    "Padded": ("nn.Embedding(5, 4, padding_idx=1)", "x * m.l(torch.arange(len(x)) % 3)"),
    "Bag": ("nn.EmbeddingBag(5, 4)", "x + m.l(torch.arange(2 * len(x)).view(-1, 2) % 5)"),
    "Attention": ("nn.MultiheadAttention(4, 2)", "m.l(*[x[:, None]] * 3, need_weights=False)[0][:, 0]"),
    "Weights": ("nn.MultiheadAttention(4, 2, bias=False)", "m.l(*[x[:, None]] * 3)[0][:, 0]"),
    "Fused": ("nn.Linear(4, 12)", "nn.functional.scaled_dot_product_attention(*m.l(x)[None].chunk(3, -1))[0]"),
    "Encoder": ("nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)", "m.l(x[:, None])[:, 0]"),
    "LSTM": ("nn.LSTM(4, 4)", "m.l(x[:, None])[0][:, 0]"),
    "GRU": ("nn.GRU(4, 2, bidirectional=True)", "m.l(x[:, None])[0][:, 0]"),
    "RNN": ("nn.RNN(4, 4)", "m.l(x)[0]"),
    "LSTMCell": ("nn.LSTMCell(4, 4)", "m.l(x, (x, x.sin()))[1]"),
    "GRUCell": ("nn.GRUCell(4, 4)", "m.l(x, x.cos())"),
    "Bilinear": ("nn.Bilinear(4, 4, 4)", "m.l(x, x.sin())"),
    "Scalar": ("nn.Parameter(torch.tensor(1.1))", "x * m.l"),
    "Factor": ("nn.ParameterList([torch.tensor(1.1), torch.eye(4) + 0.1])", "x.tanh() @ m.l[1].detach() * m.l[0]"),
    "Empty": ("nn.ParameterList([torch.empty(0), torch.ones(4)])", "x * m.l[1] + m.l[0].sum()"),
    "Experts": ("nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])", "m.l[branch % 2](x)"),
    "Optional": ("nn.ModuleList([nn.Linear(4, 4), nn.PReLU(4)])", "m.l[1](m.l[0](x)) if branch % 2 else m.l[0](x)"),
    "Low": ("nn.Linear(4, 4).bfloat16()", "m.l(x.bfloat16()).to(x.dtype)"),
    "Raw": ("nn.ParameterList([torch.ones(5), torch.eye(4) + 0.1 * torch.arange(16).view(4, 4).sin()])", "x @ ({how})"),
}  # fmt: skip
BRANCHING = ("Experts", "Optional")
# What a raw parameter w (4, 4), which begins at an odd offset of its page, may be read through.
READINGS = (
    "w.t()", "w.mT.contiguous()", "w[:, [1, 0, 3, 2]]", "torch.stack(w.unbind(1))", "w.as_strided((4, 4), (1, 4), 0)",
    "w.as_strided((4, 4), (0, 2), 1)", "w.view(-1)[3:7].expand(4, 4)", "torch.cat(w.chunk(2, 1)[::-1], 1)",
    "w.detach() + w", "torch.view_as_real(torch.view_as_complex(w.view(4, 2, 2)) * 1j).flatten(1)",
    "w.clone().mul_(2)", "w.detach().t_() * w", "w.data @ w", "w.diagonal().diag() + w", "torch.linalg.matrix_exp(w)",
    "torch.linalg.inv(w + 4 * torch.eye(4))", "torch.einsum('ij,kj->ik', w, w)",
    "w.permute(1, 0).reshape(2, 8).view(4, 4)", "w.roll(1, 0).tril()", "w.softmax(-1)", "w / w.norm()",
    "w[:2].repeat(2, 1)", "torch.where(w > 0, w, 0)", "w.expand(2, 4, 4).sum(0)", "w.unfold(0, 2, 2).reshape(4, 4)",
    "w.squeeze().unsqueeze(0)[0]", "w.movedim(0, 1).flip(0)", "torch.linalg.qr(w)[0]",
    "w.to(torch.float32).to(w.dtype)", "w.narrow(0, 1, 2).repeat(2, 1)", "w.cumsum(0) * w.new_full((), 2)",
    "w.requires_grad * w", "w.take_along_dim(w.argsort(0), 0)",
)  # fmt: skip
CHECKPOINTS = {
    "": "{block}(x{branch})",
    "ours": "self.checkpoint({block}, x{branch})",
    "reentrant": "torch.utils.checkpoint.checkpoint({block}, x{branch}, use_reentrant=True)",
    "other": "torch.utils.checkpoint.checkpoint({block}, x{branch}, use_reentrant=False)",
}
JOINS = ("x = torch.tanh({call})", "x = x + {call}", "x = {call}", "x = torch.sin({call}) * x")
HOOKS = {
    "forward": "{block}.register_forward_hook(lambda m, args, out: out * 0.7)",
    "before": "{block}.register_forward_pre_hook(lambda m, args: (args[0] * 1.2, *args[1:]))",
    "backward": "{block}.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5, *gi[1:]))",
    "gradient": "next({block}.parameters()).register_hook(lambda g: g * 0.5)",
    "accumulated": "next({block}.parameters()).register_post_accumulate_grad_hook(lambda p: None)",
}
ON_PARAMETERS = ("gradient", "accumulated")


@dataclass(frozen=True)
class Block:
    """One block of a network, which calls it `self.b{number}`.

    `again` is an earlier block that is registered, and called, once more; `tied` one whose first weight it takes over.
    `frozen`: "all" of its parameters, the "first", or none.
    """

    number: int
    kind: str = "linear"
    how: str = ""
    join: str = JOINS[0]
    checkpoint: str = ""
    hook: str = ""
    frozen: str = ""
    again: int | None = None
    tied: int | None = None
    calls: int = 1


def _draw_block(random, number):
    kind = random.choice(("linear", "linear", "norm", "Raw", "Raw", *LAYERS, *CLASSES))
    block = Block(number, kind, random.choice(READINGS), random.choice(JOINS))
    if random.random() < 0.15:
        block = replace(block, checkpoint=random.choice(list(CHECKPOINTS)))
    if random.random() < 0.15:
        block = replace(block, hook=random.choice(list(HOOKS)))
    if random.random() < 0.15:
        block = replace(block, frozen=random.choice(("all", "first")))
    if random.random() < 0.1:
        block = replace(block, calls=2)
    return block


def draw_blocks(random):
    blocks = []
    for number in range(random.choice((1, 2, 2, 3, 3, 4, 5))):
        block = _draw_block(random, number)
        if blocks and random.random() < 0.15:
            source = random.choice(blocks)
            block = replace(block, kind=source.kind, how=source.how, again=source.number)
        elif block.kind == "linear" and random.random() < 0.2:
            block = replace(block, tied=next((b.number for b in blocks if b.kind == "linear"), None))
        blocks.append(block)
    return tuple(blocks)


def branches(blocks):
    """Whether the network's forward takes a branch."""
    return any(block.kind in BRANCHING for block in blocks)


def unsplit(blocks):
    """Names of modules in which ranks may branch."""
    return [f"b{block.number}" for block in blocks if block.kind in BRANCHING and _source(block, blocks) is block]


def text(blocks):
    """The classes of a network of these blocks."""
    classes = [_class(block) for block in blocks if block.kind in CLASSES]
    built = [line for block in blocks for line in _built(block, blocks)]
    called = [line for block in blocks for line in _called(block, blocks)]
    branch = ", branch=0" if branches(blocks) else ""
    methods = [
        "def __init__(self, checkpoint):",
        *(f"    {line}" for line in ("super().__init__()", "self.checkpoint = checkpoint", *built)),
        "",
        f"def forward(self, x{branch}):",
        *(f"    {line}" for line in (*called, "return x")),
    ]
    return "\n".join([*dict.fromkeys(classes), "", "class Net(nn.Module):", *(f"    {line}" for line in methods), ""])


def _name(block):
    return f"{block.kind}{READINGS.index(block.how)}" if block.kind == "Raw" else block.kind


def _class(block):
    layer, result = CLASSES[block.kind]
    branch = ", branch" if block.kind in BRANCHING else ""
    result = result.format(how=block.how) if block.kind == "Raw" else result
    first = "w = m.l[1]; " if block.kind == "Raw" else ""
    return (
        f"class {_name(block)}(nn.Module):\n"
        f"    def __init__(m): super().__init__(); m.l = {layer}\n"
        f"    def forward(m, x{branch}): {first}return {result}\n"
    )


def _source(block, blocks):
    """The block that this one is, which is another one where it is that `again`."""
    sources = [
        other for other in blocks if other.number == block.again and other.kind == block.kind and other is not block
    ]
    return sources[0] if sources else block


def _built(block, blocks):
    name, source = f"self.b{block.number}", _source(block, blocks)
    if source is not block:
        return [f"{name} = self.b{source.number}"]
    built = LAYERS.get(block.kind) or f"{_name(block)}()"
    lines = [f"{name} = {built}"]
    tied = [other for other in blocks if other.number == block.tied and other.kind == block.kind == "linear"]
    lines += [f"{name}.weight = self.b{tied[0].number}.weight"] if tied else []
    if block.frozen == "all":
        lines.append(f"{name}.requires_grad_(False)")
    if block.frozen == "first":
        lines.append(f"next({name}.parameters()).requires_grad_(False)")
    if block.hook and not (block.frozen and block.hook in ON_PARAMETERS) and not tied:
        lines.append(HOOKS[block.hook].format(block=name))
    return lines


def _called(block, blocks):
    call = CHECKPOINTS[block.checkpoint].format(
        block=f"self.b{block.number}", branch=", branch" if block.kind in BRANCHING else ""
    )
    return [block.join.format(call=call)] * block.calls
