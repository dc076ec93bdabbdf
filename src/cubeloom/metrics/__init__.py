"""What a run says of itself: records of its steps, its progress, how well it uses the devices, and a report of it all."""

from cubeloom.metrics.flops import flops_per_token as flops_per_token
from cubeloom.metrics.flops import mfu as mfu
from cubeloom.metrics.flops import peak_of as peak_of
from cubeloom.metrics.metrics import Metrics as Metrics
from cubeloom.metrics.progress import Shown as Shown
from cubeloom.metrics.progress import progress as progress
from cubeloom.metrics.record import Record as Record
from cubeloom.metrics.report import write_report as write_report
from cubeloom.metrics.sinks import check_sinks as check_sinks
