"""The folder on the import path of model processes, with the module that `model.py` imports."""
