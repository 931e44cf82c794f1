"""What a person asks of a plan: why this layout and not another, and what another way would cost.

Every answer is a search asked again: on the same cluster, with the same cost model and the plan's own options, under
one pin more.
"""

from autopar.questions.answers import Binding, Explanation, WhyNot
from autopar.questions.explain import explain
from autopar.questions.why_not import why_not

__all__ = ["Binding", "Explanation", "WhyNot", "explain", "why_not"]
