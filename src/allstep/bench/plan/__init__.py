"""`allstep bench plan`: steps of many workers on a few cores, predicted and measured.

The workers train for real, except that their layers sleep instead of computing, so 8 of them fit on
2 cores. Start with `measure`.
"""
