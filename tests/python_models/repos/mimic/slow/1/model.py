
import time, numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
class TritonPythonModel:
    """text_input = number of tokens; one token every 50 ms; checks is_cancelled and logs what happened"""
    def execute(self, requests):
        for r in requests:
            n = int(pb_utils.get_input_tensor_by_name(r,"text_input").as_numpy().reshape(-1)[0])
            s = r.get_response_sender(); i = 0; t0=time.time(); c = False
            for i in range(n):
                if s.is_cancelled():
                    c = True  # never call is_cancelled() after FINAL: segfaults tritonserver 2.51
                    s.send(pb_utils.InferenceResponse([], pb_utils.TritonError("request was cancelled", pb_utils.TritonError.CANCELLED)), flags=FINAL)
                    break
                s.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([b"tok%d" % i],dtype=object))]))
                time.sleep(0.05)
            else:
                s.send(flags=FINAL)
            with open(__import__("os").environ.get("SLOW_MODEL_LOG","slow-model.log"),"a") as f:
                f.write(f"id={r.request_id()!r} asked={n} sent={i} cancelled={c} secs={time.time()-t0:.2f}\n")
# ruff: noqa
