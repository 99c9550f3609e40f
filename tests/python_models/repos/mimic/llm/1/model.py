
import json, time, numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
def get(r, n, default=None):
    t = pb_utils.get_input_tensor_by_name(r, n)
    return default if t is None else t.as_numpy().reshape(-1)
def out(text):
    f = np.float32
    T = pb_utils.Tensor
    return pb_utils.InferenceResponse([T("text_output", np.array([text.encode()], dtype=object)),
        T("cum_log_probs", np.zeros((1,1), f)), T("output_log_probs", np.zeros((1,1,1), f)),
        T("context_logits", np.zeros((1,1,1), f)), T("generation_logits", np.zeros((1,1,1,1), f))])
class TritonPythonModel:
    """echo the words of text_input, at most max_tokens of them; one response per word when stream."""
    def initialize(self, args):
        cfg = json.loads(args["model_config"])
        self.decoupled = cfg.get("model_transaction_policy",{}).get("decoupled", False)
        p = cfg.get("parameters",{})
        self.empty_final = p.get("empty_final",{}).get("string_value","false") == "true"
        self.cycle = p.get("cycle",{}).get("string_value","false") == "true"
        self.delay = float(p.get("delay_ms",{}).get("string_value","0"))/1e3
    def execute(self, requests):
        resp = []
        for r in requests:
            words = get(r,"text_input")[0].decode("utf-8","replace").split()
            n = int(get(r,"max_tokens",[len(words)])[0])
            stream = bool(get(r,"stream",[False])[0])
            if self.cycle and words: words = (words * (n // len(words) + 1))
            words = words[:n]
            if not self.decoupled:
                if stream:
                    resp.append(pb_utils.InferenceResponse([], pb_utils.TritonError("Streaming is only supported in decoupled mode.")))
                else:
                    resp.append(out(" ".join(words)))
                continue
            s = r.get_response_sender()
            msgs = [(" " if i else "")+w for i,w in enumerate(words)] if stream else [" ".join(words)]
            if not msgs: msgs=[""]
            for i,m in enumerate(msgs):
                if self.delay: time.sleep(self.delay)
                last = i == len(msgs)-1
                s.send(out(m), flags=FINAL if (last and not self.empty_final) else 0)
            if self.empty_final: s.send(flags=FINAL)
        return None if self.decoupled else resp
# ruff: noqa
