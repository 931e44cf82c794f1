"""The whole model: pipeline stages × mesh of one stage × micro-batches × schedule, with layouts and recomputation."""

from autopar.pipelines.plan import staged as staged
from autopar.pipelines.plan import staged_below as staged_below
