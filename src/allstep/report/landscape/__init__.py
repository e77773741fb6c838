"""Plots of the loss around trained weights: contours, surfaces, curves and lines.

`draw` has one function per plot, `figures` puts them together: as a file (`allstep landscape
--plot`), or as images of a page. The figures come from RUN/landscape (`study.landscape.result`).
"""

from allstep.report.landscape.figures import LandscapeView, draw_file, views

__all__ = ["LandscapeView", "draw_file", "views"]
