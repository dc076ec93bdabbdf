"""What a run writes down: records of its steps, its progress, its model FLOPs utilisation, and a report."""

from cubeloom.train.metrics.flops import flops_per_token as flops_per_token
from cubeloom.train.metrics.flops import mfu as mfu
from cubeloom.train.metrics.flops import peak_of as peak_of
from cubeloom.train.metrics.flops import tokens_of as tokens_of
from cubeloom.train.metrics.metrics import Metrics as Metrics
from cubeloom.train.metrics.progress import Shown as Shown
from cubeloom.train.metrics.progress import progress as progress
from cubeloom.train.metrics.record import Record as Record
from cubeloom.train.metrics.report import write_report as write_report
from cubeloom.train.metrics.sinks import check_sinks as check_sinks
