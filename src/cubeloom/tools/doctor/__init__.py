"""What this machine is, what ranks on it can do, and what is wrong with it."""

from cubeloom.tools.doctor.checks import examine as examine
from cubeloom.tools.doctor.facts import Facts as Facts
from cubeloom.tools.doctor.findings import Finding as Finding
from cubeloom.tools.doctor.findings import Severity as Severity
from cubeloom.tools.doctor.gather import gather as gather
