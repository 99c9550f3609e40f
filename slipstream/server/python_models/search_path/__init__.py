"""On the import path of a model's process, and of no other: it holds the module that `model.py`
imports.
"""
