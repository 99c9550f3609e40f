
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    """non-decoupled; text_input = milliseconds to sleep"""
    def execute(self, requests):
        out=[]
        for r in requests:
            t = pb_utils.get_input_tensor_by_name(r,"text_input").as_numpy()
            t0=time.time(); ms=int(t.reshape(-1)[0]); c=False
            while (time.time()-t0)*1e3 < ms:
                time.sleep(0.01)
                if r.is_cancelled(): c=True; break
            with open(__import__("os").environ.get("SLOW_MODEL_LOG","slow-model.log"),"a") as f: f.write(f"nd id={r.request_id()!r} asked_ms={ms} cancelled={c} secs={time.time()-t0:.2f}\n")
            if c: out.append(pb_utils.InferenceResponse([], pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)))
            else: out.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", t)]))
        return out
# ruff: noqa
