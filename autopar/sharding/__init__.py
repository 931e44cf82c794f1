"""How each op may be split: one-axis rules, roles of axes, products over a mesh."""

from autopar.sharding.build import build_table as build_table
from autopar.sharding.build import expert_count as expert_count
from autopar.sharding.build import followed_sizes as followed_sizes
from autopar.sharding.build import survey_model as survey_model
from autopar.sharding.carry import carried as carried
from autopar.sharding.carry import cuts_of as cuts_of
from autopar.sharding.dtensor_rules import RuleCache as RuleCache
from autopar.sharding.dtensor_rules import one_axis_rules as one_axis_rules
from autopar.sharding.pins import INPUT as INPUT
from autopar.sharding.pins import PinError as PinError
from autopar.sharding.pins import is_layout_pin as is_layout_pin
from autopar.sharding.pins import matching as matching
from autopar.sharding.pins import stage_blocks as stage_blocks
