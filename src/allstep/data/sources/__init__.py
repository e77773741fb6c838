"""Sources: read samples by number, one module or package per format.

All have the interface of `source.Source`; `data.opening` chooses the class for a path.
"""
