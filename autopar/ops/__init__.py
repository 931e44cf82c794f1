"""What is special about an op: own rules, local forms, inner collectives, flops, views, randomness."""

from autopar.ops.entry import LocalCall as LocalCall
from autopar.ops.entry import LocalContext as LocalContext
from autopar.ops.entry import OpEntry as OpEntry
from autopar.ops.entry import all_replicated as all_replicated
from autopar.ops.lowering import flops as flops
from autopar.ops.lowering import held_bytes as held_bytes
from autopar.ops.lowering import inner_collectives as inner_collectives
from autopar.ops.lowering import is_random as is_random
from autopar.ops.lowering import is_view as is_view
from autopar.ops.lowering import local_call as local_call
from autopar.ops.lowering import moved_bytes as moved_bytes
from autopar.ops.lowering import rounds as rounds
from autopar.ops.table import TABLE as TABLE
