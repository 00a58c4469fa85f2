"""Pictures of a program as data, text, DOT and SVG. Nothing is started for them."""

from lp_pipe.graph.dot import to_dot as to_dot
from lp_pipe.graph.graph_view import GraphView as GraphView
from lp_pipe.graph.graph_view import NodeView as NodeView
from lp_pipe.graph.svg import to_svg as to_svg
from lp_pipe.graph.text_tree import to_text as to_text
