"""horovodrun's flags, translated to those of `allstep run`.

May import: `launch` and below. Start with `flags`; `flags_table` lists them all.
"""
