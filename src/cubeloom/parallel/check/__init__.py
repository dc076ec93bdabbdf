"""A cut is checked by running its model twice without values: once whole, and once as a rank of the grid runs it.

The whole run records every operation between the declared layers. The rank's run follows the record with local sizes, and
knows of each tensor which axes cut which dimension. An operation that computes something else on parts than on the whole is
refused with its file and line, before anything is allocated.
"""

from cubeloom.parallel.check.check import check as check
from cubeloom.parallel.check.check import where_called as where_called
from cubeloom.parallel.check.inputs import Example as Example
from cubeloom.parallel.check.inputs import Given as Given
from cubeloom.parallel.check.record import Call as Call
from cubeloom.parallel.check.record import calls_of as calls_of
