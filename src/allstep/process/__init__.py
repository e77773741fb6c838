"""Other processes: whether they live, and how Python is started on a module of ours.

Standard library only. Imports only `errors`. Start with `liveness`.
"""
