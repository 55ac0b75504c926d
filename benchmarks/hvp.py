"""Hessian-vector products through shards beside those of a plain module in one process, for the same work per rank.

    OMP_NUM_THREADS=1 python benchmarks/hvp.py
    OMP_NUM_THREADS=1 python benchmarks/hvp.py --rounds 20 --write

``single`` is jvp of grad over the parameters of an unsharded module, on every rank, without communication; its product
is of that rank's own loss. The others average over the ranks. All use attention that has every derivative.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from contenders import STAGES, Batch, Paging, make_batches
from gpt import GPT
from report import Sheet, ratios, spread
from rich.console import Console
from timing import Plan, alternate
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_step import NUM_RANKS, TIMEOUT_S, environment_of

import zerofunc
from zerofunc import curvature
from zerofunc_testing.pool import RankPool

NAMES = ("single", *STAGES)
TARGETS = {**dict.fromkeys(("stage0", "stage1", "stage2"), 1.15), "stage3": 1.4}
RESULTS = Path(__file__).with_name("RESULTS_HVP.md")

Trees = dict[str, torch.Tensor]


def single(batch: Batch) -> Callable[[], Trees]:
    """A function that multiplies with this rank's own Hessian, of full tensors."""
    model = _model()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    direction = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def loss(p: Trees) -> torch.Tensor:
        return torch.func.functional_call(model, p, (batch.tokens, batch.targets))

    return lambda: torch.func.jvp(torch.func.grad(loss), (parameters,), (direction,))[1]


def sharded(stage: int, paging: Paging, batch: Batch) -> Callable[[], Trees]:
    """Collective. A function that multiplies with the mean Hessian, of shards."""
    module = zerofunc.shard(_model(), stage, **paging.config())
    direction = zerofunc.draw(module, 0)

    def loss(shards: Trees) -> torch.Tensor:
        return zerofunc.functional_call(module, shards, (batch.tokens, batch.targets))

    return lambda: curvature.hvp(loss, module, direction)


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def time_products(plan: Plan) -> dict[str, list[float]]:
    """Collective. Seconds per product of each contender, by round."""
    (batch,) = make_batches(1)
    tasks = {
        name: single(batch) if name == "single" else sharded(STAGES[name], plan.paging, batch) for name in plan.names
    }
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():  # nothing differentiates the products again
        return alternate("hvp", tasks, plan)


def sheet_of(seconds: dict[str, list[float]]) -> Sheet:
    """Seconds and ratios."""
    rows = [
        [
            name,
            spread(values, 3),
            spread(ratios(seconds, name, "single")),
            f"<= {TARGETS[name]:.2f}" if name in TARGETS else "",
        ]
        for name, values in seconds.items()
    ]
    note = (
        "Contenders take turns within one process group. Ratios are taken within each round, between neighbours in "
        "time: medians and, in brackets, quartiles."
    )
    return Sheet("Hessian-vector product", ["contender", "s / product", "x single", "target"], rows, note)


def main() -> None:
    """Measure, show, and write where asked to."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, after those that warm up")
    parser.add_argument("--products-per-round", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--page-mib", type=float, help="size of zerofunc's pages")
    parser.add_argument("--resident-mib", type=float, help="bound on gathered pages at stage 3")
    parser.add_argument("--write", action="store_true", help=f"rewrite {RESULTS.name} beside this script")
    options = parser.parse_args()
    command = f"`{shlex.join(['python', 'benchmarks/hvp.py', *sys.argv[1:]])}`"
    environment = {**environment_of([]), "command": command}
    paging = Paging(options.page_mib, options.resident_mib)
    plan = Plan(list(options.only), options.rounds, options.products_per_round, paging)
    with RankPool(NUM_RANKS, timeout_s=TIMEOUT_S) as pool:
        sheet = sheet_of(pool.run(time_products, plan)[0])
    Console().print(sheet.rich())
    if options.write:
        facts = "\n".join(f"- {name}: {fact}" for name, fact in environment.items())
        RESULTS.write_text(f"# Results of benchmarks/hvp.py\n\n{facts}\n\n{sheet.markdown()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
