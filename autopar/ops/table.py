"""The table: op name -> entry. To add an op, add an entry to a family below (or a family) and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ops.attention import ATTENTION
from autopar.ops.convolution import CONVOLUTIONS
from autopar.ops.entry import OpEntry
from autopar.ops.experts import EXPERT_OPS
from autopar.ops.factories import FACTORIES
from autopar.ops.indexing import INDEXING
from autopar.ops.matmul import MATMULS
from autopar.ops.norms import NORMS
from autopar.ops.pointwise import POINTWISE
from autopar.ops.random import RANDOM
from autopar.ops.reductions import REDUCTIONS
from autopar.ops.region import REGIONS
from autopar.ops.views import VIEWS

FAMILIES: tuple[Mapping[str, OpEntry], ...] = (
    VIEWS,
    MATMULS,
    EXPERT_OPS,
    ATTENTION,
    REDUCTIONS,
    INDEXING,
    FACTORIES,
    RANDOM,
    NORMS,
    CONVOLUTIONS,
    POINTWISE,
    REGIONS,
)

TABLE: Mapping[str, OpEntry] = {name: entry for family in FAMILIES for name, entry in family.items()}
