"""What does the model compute: model, example inputs -> `CapturedGraph`."""

from autopar.tracer.capture import capture
from autopar.tracer.check import check_graph
from autopar.tracer.interpret import Result, Watch, interpret
from autopar.tracer.wide import Wide

__all__ = ["Result", "Watch", "Wide", "capture", "check_graph", "interpret"]
