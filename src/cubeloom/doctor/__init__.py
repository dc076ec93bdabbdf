"""What this machine is, what ranks on it can do, and what is wrong with it."""

from cubeloom.doctor.checks import examine as examine
from cubeloom.doctor.facts import Facts as Facts
from cubeloom.doctor.findings import Finding as Finding
from cubeloom.doctor.findings import Severity as Severity
from cubeloom.doctor.gather import gather as gather
