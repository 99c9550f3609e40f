
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        o=[]
        for r in requests:
            a = pb_utils.get_input_tensor_by_name(r,"INPUT0").as_numpy(); b = pb_utils.get_input_tensor_by_name(r,"INPUT1").as_numpy()
            o.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a+b), pb_utils.Tensor("OUTPUT1", a-b)]))
        return o
# ruff: noqa
