"""The HTML page about one run, or about several compared: `allstep report RUN...`.

    run folder(s) --> run (reads)  --> series*, split*, glance (figures)-.
                                   --> judge, compare (findings)       --+--> page --> one HTML file
                                   --> configs (what differs)          --'     |
                                                     curves, heat (geometry) --'

`run` reads a run folder, `study.recorded` (*) computes series and the split of the time, `judge`
explains what they mean, `curves` turns them into coordinates, and `page` fills the template. The
page needs neither network nor script: a script only adds figures under the pointer. docs/report.md
lists the files of a run that the report reads.
"""

from allstep.report.judge import judge
from allstep.report.judgement import Judgement
from allstep.report.page import write_report
from allstep.report.run import Run, read_run

__all__ = ["Judgement", "Run", "judge", "read_run", "write_report"]
