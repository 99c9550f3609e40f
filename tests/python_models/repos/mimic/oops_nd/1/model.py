
import json, numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        out=[]
        for r in requests:
            c = pb_utils.get_input_tensor_by_name(r,"text_input").as_numpy().reshape(-1)[0].decode()
            if c == "raise": raise RuntimeError("boom from execute")
            if c == "error": out.append(pb_utils.InferenceResponse([], pb_utils.TritonError("injected error nd"))); continue
            if c.startswith("code:"): out.append(pb_utils.InferenceResponse([], pb_utils.TritonError("injected "+c[5:], getattr(pb_utils.TritonError, c[5:])))); continue
            if c == "params": c = r.parameters()
            if c == "reqinfo": c = json.dumps({"id": r.request_id(), "corr": r.correlation_id(), "timeout": r.timeout(), "flags": r.flags(), "params": r.parameters()})
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([c.encode()],dtype=object))]))
        return out
# ruff: noqa
