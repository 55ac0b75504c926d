"""Nestings of transforms as expressions: over a module's inputs, over its full parameters, and over shards."""

# From a function F of samples to another one, as text; both take and give (3, 4).
OVER_INPUTS = {
    "jvp": "lambda a: jvp({F}, (a,), (a.cos(),))[1]",
    "vjp": "lambda a: vjp({F}, a)[1](a.cos())[0]",
    "grad": "grad(lambda a: ({F})(a).square().sum())",
    "jacrev": "lambda a: jacrev({F})(a).square().sum((0, 1))",
    "jacfwd": "lambda a: jacfwd({F})(a).square().sum((0, 1))",
    "hessian": "lambda a: hessian(lambda b: ({F})(b).square().sum())(a).square().sum((0, 1))",
    "vmap": "vmap(lambda b: ({F})(b[None])[0])",
    "checkpoint": "lambda a: m.checkpoint({F}, a)",
    "linearize": "lambda a: linearize({F}, a)[1](a.cos())",
}
ORDER = {"vmap": 0, "checkpoint": 0, "hessian": 2}
AUTOGRAD = "lambda a: torch.autograd.grad(({F})(a.requires_grad_()).square().sum(), a, create_graph=True)[0]"

# Over the full parameters p of this rank's module: c(p, x) is its output, L(p) a loss.
OVER_PARAMETERS = {
    "grad": "grad(L)(p)",
    "jvp": "jvp(lambda p: c(p, x), (p,), (cosines(p),))[1]",
    "vjp": "vjp(lambda p: c(p, x), p)[1](x.cos())[0]",
    "hvp": "jvp(grad(L), (p,), (cosines(p),))[1]",
    "reverse over reverse": "grad(lambda p: dot(grad(L)(p), cosines(p)))(p)",
    "norm of the gradient": "grad(lambda p: dot(grad(L)(p), grad(L)(p)))(p)",
    "per sample": "vmap(grad(lambda p, a: c(p, a[None]).square().sum()), (None, 0))(p, x)",
    "per-sample hvp": "vmap(lambda a: jvp(grad(lambda p: c(p, a[None]).square().sum()), (p,), (cosines(p),))[1])(x)",
    "jacrev": "jacrev(lambda p: c(p, x).sum(0))(p)",
    "jacfwd": "jacfwd(lambda p: c(p, x).sum(0))(p)",
    "linearize": "linearize(lambda p: c(p, x), p)[1](cosines(p))",
    "of inputs": "grad(lambda a: sum(t.square().sum() for t in grad(lambda p: c(p, a).square().sum())(p).values()))(x)",
    "third": "jvp(lambda p: jvp(grad(L), (p,), (cosines(p),))[1], (p,), (cosines(p),))[1]",
    "third, reverse": "grad(lambda p: dot(jvp(grad(L), (p,), (cosines(p),))[1], cosines(p)))(p)",
    "ensemble": "vmap(lambda p: c(p, x))({n: torch.stack([t, 0.5 * t]) for n, t in p.items()})",
    "vmap of hvp": "vmap(lambda k: jvp(grad(L), (p,), ({n: k * t for n, t in cosines(p).items()},))[1])(torch.ones(2))",
}
# Over shards s, with a direction v: L(s) is this rank's loss, or in plain PyTorch the mean of all. A tree results.
OVER_SHARDS = {
    "grad": "grad(L)(s)",
    "vjp": "vjp(L, s)[1](torch.tensor(2.0))[0]",
    "hvp": "jvp(grad(L), (s,), (v,))[1]",
    "reverse over reverse": "grad(lambda s: dot(grad(L)(s), v))(s)",
    "norm of the gradient": "grad(lambda s: dot(grad(L)(s), grad(L)(s)))(s)",
    "hvp of vjp": "jvp(lambda s: vjp(L, s)[1](torch.tensor(1.0))[0], (s,), (v,))[1]",
    "third": "jvp(lambda s: jvp(grad(L), (s,), (v,))[1], (s,), (v,))[1]",
    "third, reverse": "grad(lambda s: dot(jvp(grad(L), (s,), (v,))[1], v))(s)",
    "third, all reverse": "grad(lambda s: dot(grad(lambda s: dot(grad(L)(s), v))(s), v))(s)",
    "vmap of hvp": "{n: t.sum(0) for n, t in vmap(lambda k: jvp(grad(L), (s,), ({n: k * t for n, t in v.items()},))[1])"
    "(torch.tensor([1.0, 2.0])).items()}",
    "jacrev": "{n: t.sum(0) for n, t in jacrev(lambda s: torch.stack([L(s), 2 * L(s)]))(s).items()}",
    "a step ahead": "grad(lambda s: L({n: s[n] - 0.1 * g for n, g in grad(L)(s).items()}))(s)",
    "decay": "grad(lambda s: L(s) + 0.1 * dot(s, s))(s)",
    "moved": "grad(L)({n: 1.1 * t for n, t in s.items()})",
}


def draw_over_inputs(random, depth):
    """Names of up to `depth` transforms, the innermost first, of third order together at most."""
    names, order = [], 0
    for _ in range(random.randint(1, depth)):
        name = random.choice(list(OVER_INPUTS))
        order += ORDER.get(name, 1)
        if order > 3:
            break
        names.append(name)
    return tuple(names)


def over_inputs(names, call):
    """The text of a function of samples: `call` transformed."""
    for name in names:
        call = (AUTOGRAD if name == "autograd" else OVER_INPUTS[name]).format(F=call)
    return call
