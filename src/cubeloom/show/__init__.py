"""Pictures of schedules: in the terminal, as SVG, as a self-contained page, and as a trace for Perfetto."""

from cubeloom.show.page import to_html as to_html
from cubeloom.show.svg import to_svg as to_svg
from cubeloom.show.terminal import drawing as drawing
from cubeloom.show.terminal import summary as summary
from cubeloom.show.trace import to_trace as to_trace
