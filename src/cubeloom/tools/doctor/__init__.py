"""Inspects this machine: its properties, what ranks on it achieve, and what is wrong with it."""

from cubeloom.tools.doctor.checks import examine as examine
from cubeloom.tools.doctor.facts import Facts as Facts
from cubeloom.tools.doctor.findings import Finding as Finding
from cubeloom.tools.doctor.findings import Severity as Severity
from cubeloom.tools.doctor.gather import gather as gather
