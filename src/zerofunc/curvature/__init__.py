"""Curvature of the mean loss over all ranks, as products with sharded trees and as estimates from them.

Everything here is Collective, averages over ranks, and takes and gives sharded trees (``{name: this rank's 1-D part}``)
of the module's trainable parameters. A loss is a function of shards that calls :func:`zerofunc.functional_call`:

    product = lambda v: curvature.hvp(loss, module, v)
    curvature.lanczos(product, module, 20).eigenvalues[0]

Estimates and solvers take a product, so that each of them works with the Hessian, the Gauss-Newton matrix, a damped or
a preconditioned one alike.
"""

from zerofunc.curvature.fisher import fisher_diagonal
from zerofunc.curvature.krylov import (
    ConjugateGradient,
    Lanczos,
    SpectralDensity,
    conjugate_gradient,
    lanczos,
    spectral_density,
)
from zerofunc.curvature.products import Estimate, ggnvp, hutchinson_diagonal, hutchinson_trace, hvp

__all__ = [
    "ConjugateGradient",
    "Estimate",
    "Lanczos",
    "SpectralDensity",
    "conjugate_gradient",
    "fisher_diagonal",
    "ggnvp",
    "hutchinson_diagonal",
    "hutchinson_trace",
    "hvp",
    "lanczos",
    "spectral_density",
]
