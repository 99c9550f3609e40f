import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self,args):
        raise RuntimeError('no such engine: /engines/x/rank0.engine')
    def execute(self,requests): return []
# ruff: noqa
