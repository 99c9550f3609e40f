
import time, numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
def ok(t): return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([t.encode()],dtype=object))])
def err(t, c=None): return pb_utils.InferenceResponse([], pb_utils.TritonError(t) if c is None else pb_utils.TritonError(t, c))
class TritonPythonModel:
    """decoupled error-injection model; text_input is the command"""
    def execute(self, requests):
        for r in requests:
            c = pb_utils.get_input_tensor_by_name(r,"text_input").as_numpy().reshape(-1)[0].decode()
            s = r.get_response_sender()
            if c == "raise": raise RuntimeError("boom from execute")
            if c == "error_first": s.send(err("injected error first"), flags=FINAL)
            elif c == "error_mid":
                s.send(ok("one")); s.send(err("injected error mid")); s.send(ok("three")); s.send(flags=FINAL)
            elif c == "error_last":
                s.send(ok("one")); s.send(ok("two")); s.send(err("injected error last"), flags=FINAL)
            elif c == "error_only_then_final":
                s.send(err("injected error then final")); s.send(flags=FINAL)
            elif c == "zero": s.send(flags=FINAL)
            elif c == "two": s.send(ok("one")); s.send(ok("two"), flags=FINAL)
            elif c == "one_then_final": s.send(ok("one")); s.send(flags=FINAL)
            elif c.startswith("code:"):
                s.send(err("injected "+c[5:], getattr(pb_utils.TritonError, c[5:])), flags=FINAL)
            elif c == "unicode": s.send(ok("h\u00e9llo \u4f60\u597d \U0001f600 \"q\" \\ \n\t\u0001 </x>")); s.send(flags=FINAL)
            elif c == "badutf8": s.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([b"\xff\xfeA"],dtype=object))])); s.send(flags=FINAL)
            else: s.send(ok(c), flags=FINAL)
# ruff: noqa
