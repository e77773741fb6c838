"""Text for the terminal: numbers with units, tables, progress bars, escaping of untrusted text.

Uses the standard library, and rich for tables and progress bars; imports only `errors`. Start with
`quantities`.
"""
