
import numpy as np, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args): self.v = args["model_version"]
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([("v"+self.v).encode()],dtype=object))]) for r in requests]
# ruff: noqa
