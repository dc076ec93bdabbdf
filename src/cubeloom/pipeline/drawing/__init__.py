"""Pictures of schedules: in the terminal, as SVG, as a self-contained page, and as a trace for Perfetto."""

from cubeloom.pipeline.drawing.svg import to_svg as to_svg
from cubeloom.pipeline.drawing.terminal import drawing as drawing
from cubeloom.pipeline.drawing.terminal import summary as summary
from cubeloom.pipeline.drawing.trace import to_trace as to_trace
from cubeloom.pipeline.drawing.view import to_html as to_html
from cubeloom.pipeline.drawing.view import view as view
