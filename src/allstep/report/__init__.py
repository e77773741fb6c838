"""The page about a run, or about several side by side: `allstep report RUN...`.

    run folder(s) --> run (reads)  --> series, split, glance (figures) --.
                                   --> judge, compare (words)          --+--> page --> one HTML file
                                   --> configs (what differs)          --'     |
                                                     curves, heat (geometry) --'

`run` reads what a run left, `series` and `split` make curves and time splits of it, `judge` says in
words what they mean, `curves` turns them into coordinates, and `page` puts all of it into the
template. The page needs no network and no script to be read: a script adds figures under the
pointer. What it reads and which files a run leaves for it is in docs/report.md.
"""

from allstep.report.judge import judge
from allstep.report.judgement import Judgement
from allstep.report.page import write_report
from allstep.report.run import Run, read_run

__all__ = ["Judgement", "Run", "judge", "read_run", "write_report"]
