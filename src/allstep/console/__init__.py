"""Text for people: numbers with units, tables, progress, and foreign text made safe to print.

Standard library only. Imports only `errors`. Start with `quantities`.
"""
